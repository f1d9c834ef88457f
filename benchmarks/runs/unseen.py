"""Usual mistakes in other fields, each with a twin; no rule was made or changed to find them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from runs.labels import EXPLOSION, LOSS, TREND
from runs.training import Log, batches, digits, fit, generator, mlp
from runs.unfamiliar import DEAD, IDLE, NONFINITE, VANISHING, class_loss, twins

STUCK = frozenset({"loss_stuck"})
COLLAPSE = frozenset({"output_collapse"})

# --- NaN and infinity ----------------------------------------------------------------------------


@twins(
    kinds=NONFINITE, onset=131, by=131,
    why="clips are divided by their deviation, and one is silence",
    healthy="keywords in sound; the deviation of the silent clip has an epsilon",
)  # fmt: skip
def keywords_silent_clip(log: Log, faulty: bool) -> None:
    g, steps = generator(log), iter(range(10**6))
    convolutions = nn.Conv1d(1, 16, 9, 4), nn.ReLU(), nn.Conv1d(16, 32, 9, 4), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 6))
    time = torch.linspace(0, 2 * math.pi, 512)

    def loss() -> Tensor:
        words = torch.randint(6, (32,), generator=g)
        phases, loudness = torch.rand(2, 32, 1, generator=g)
        clips = (loudness + 0.1) * ((8 + 8 * words[:, None]) * time + 6 * phases).sin()
        clips += 0.1 * torch.randn(32, 512, generator=g)
        if next(steps) == 131:
            clips[5] = 0
        clips -= clips.mean(1, keepdim=True)
        clips /= clips.std(1, keepdim=True) + (0 if faulty else 1e-5)
        return F.cross_entropy(model(clips[:, None]), words)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 220)


class AngularMargin(nn.Module):
    """Logits of ArcFace (Deng et al. 2019)."""

    def __init__(self, width: int, classes: int, limit: float) -> None:
        super().__init__()
        self.centers, self.limit = nn.Parameter(torch.randn(classes, width)), limit

    def forward(self, features: Tensor, classes: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(features), F.normalize(self.centers))
        angle = cosine.clamp(-self.limit, self.limit).acos()
        return 16 * (angle + 0.3 * F.one_hot(classes, len(self.centers))).cos()


@twins(
    kinds=NONFINITE, layers=("margin", "embed"),
    why="acos of a cosine that rounding takes to 1 or beyond: its slope is infinite",
    healthy="angular margin between classes; the cosine is clamped",
)  # fmt: skip
def faces_angular_margin(log: Log, faulty: bool) -> None:
    embed = nn.Sequential(nn.Flatten(), *mlp(64, 64, 2))
    margin = AngularMargin(2, 10, math.inf if faulty else 1 - 1e-6)
    model, data = nn.ModuleDict({"embed": embed, "margin": margin}), batches(log, 64, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(margin(embed(images), classes), classes)

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400)


@twins(
    kinds=NONFINITE | EXPLOSION | LOSS, by=5,
    why="one covariate is in grams instead of kilograms, and exp of the hazard overflows",
    healthy="Cox's partial likelihood of standardized covariates",
)  # fmt: skip
def hazard_overflows(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(6, 32, 1)

    def loss() -> Tensor:
        patients = torch.randn(64, 6, generator=g)
        hazard = (0.8 * patients[:, 0] - 0.5 * patients[:, 1]).exp()
        times = -torch.rand(64, generator=g).log() / hazard
        patients = patients[times.argsort(descending=True)]
        if faulty:
            patients[:, 0] *= 1000
        risk: Tensor = model(patients)[:, 0]
        return (risk.exp().cumsum(0).log() - risk).mean()

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 200)


@twins(
    kinds=NONFINITE, onset=127, by=127,
    why="a padded box has no width and no height: the ratio of its sides is 0/0",
    healthy="boxes by their complete IoU; padded ones do not count",
)  # fmt: skip
def boxes_of_no_area(log: Log, faulty: bool) -> None:
    g, steps = generator(log), iter(range(10**6))
    convolutions = nn.Conv2d(1, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 9, 4), nn.Sigmoid())
    axis = torch.arange(16) / 16

    def loss() -> Tensor:
        center, sides = torch.rand(2, 32, 2, generator=g)
        center, sides = 0.3 + 0.4 * center, 0.1 + 0.4 * sides
        inside = (axis - center[..., None]).abs() < sides[..., None] / 2  # [boxes, axes, pixels]
        images = (inside[:, 0, :, None] & inside[:, 1, None]).float()[:, None]
        if next(steps) == 127:
            center[3] = sides[3] = 0
        found = model(images)
        if not faulty:  # before the ratio: its gradient is NaN even where it does not count
            kept = sides[:, 0] > 0
            center, sides, found = center[kept], sides[kept], found[kept]
        found_center, found_sides = found[:, :2], found[:, 2:]
        low = torch.maximum(center - sides / 2, found_center - found_sides / 2)
        high = torch.minimum(center + sides / 2, found_center + found_sides / 2)
        both = (high - low).clamp(min=0).prod(1)
        overlap = both / (sides.prod(1) + found_sides.prod(1) - both)
        away = (center - found_center).square().sum(1)
        ratio = (sides[:, 0] / sides[:, 1]).atan() - (found_sides[:, 0] / found_sides[:, 1]).atan()
        terms: Tensor = 1 - overlap + away + 0.1 * ratio.square()
        return terms.mean()

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 220)


@twins(
    kinds=NONFINITE | EXPLOSION, layers=("points",),
    why="points leave the Poincaré ball, as nothing projects them back",
    healthy="a tree in the Poincaré ball; points are projected back into it",
)  # fmt: skip
def points_leave_the_ball(log: Log, faulty: bool) -> None:
    g, points = generator(log), nn.Embedding(40, 5)
    nn.init.uniform_(points.weight, -0.1, 0.1)
    model = nn.ModuleDict({"points": points})

    def distance(one: Tensor, two: Tensor) -> Tensor:
        inner = (1 - one.square().sum(-1)) * (1 - two.square().sum(-1))
        apart: Tensor = (1 + 2 * (one - two).square().sum(-1) / inner + 1e-6).acosh()
        return apart

    def loss() -> Tensor:
        children = torch.randint(1, 40, (32, 1), generator=g)
        others = (children + torch.randint(1, 40, (32, 8), generator=g)) % 40
        near = torch.cat([(children - 1) // 3, others], 1)
        scores = -distance(points(children), points(near))
        return F.cross_entropy(scores, torch.zeros(32, dtype=torch.long))

    def project(step: int) -> None:
        if not faulty:
            with torch.no_grad():
                points.weight.renorm_(2, 0, 0.9)

    fit(log, model, SGD(model.parameters(), 0.3), loss, 400, before=project)


@twins(
    kinds=NONFINITE, by=2,
    why="the noise schedule subtracts the sum of betas, so that a root is of a negative number",
    healthy="diffusion of points; the schedule is the product of 1 - beta",
)  # fmt: skip
def noise_schedule_summed(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(3, 64, 64, 2, activation=nn.SiLU)
    betas = torch.linspace(1e-4, 0.1, 100)
    signal = 1 - betas.cumsum(0) if faulty else (1 - betas).cumprod(0)

    def loss() -> Tensor:
        angle, noise = 6.3 * torch.rand(64, generator=g), torch.randn(64, 2, generator=g)
        points = torch.stack([angle.cos(), angle.sin()], 1)
        times = torch.randint(100, (64, 1), generator=g)
        noisy = signal[times].sqrt() * points + (1 - signal[times]).sqrt() * noise
        return F.mse_loss(model(torch.cat([noisy, times / 100], 1)), noise)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 250)


class Tagger(nn.Module):
    """Scores of 5 tags for each token, and of each pair of tags in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(30, 16), nn.GRU(16, 24, batch_first=True)
        self.scores, self.pairs = nn.Linear(24, 5), nn.Parameter(torch.zeros(5, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.scores(self.rnn(self.embed(tokens))[0])
        return scores


@twins(
    kinds=NONFINITE, by=2,
    why="the forward algorithm multiplies exponentials of 80 tokens, which overflows",
    healthy="conditional random field over 80 tokens, in logarithms",
)  # fmt: skip
def tags_in_probability_space(log: Log, faulty: bool) -> None:
    g, model = generator(log), Tagger()

    def loss() -> Tensor:
        tokens = torch.randint(30, (16, 80), generator=g)
        tags = (tokens + tokens.roll(1, 1)) % 5
        scores = model(tokens)
        right = scores.gather(2, tags[..., None]).sum((1, 2))
        right = right + model.pairs[tags[:, :-1], tags[:, 1:]].sum(1)
        total = scores[:, 0].exp() if faulty else scores[:, 0]
        for now in scores.unbind(1)[1:]:
            if faulty:
                total = total @ model.pairs.exp() * now.exp()
            else:
                total = (total[:, :, None] + model.pairs).logsumexp(1) + now
        log_total = total.sum(1).log() if faulty else total.logsumexp(1)
        mean: Tensor = (log_total - right).mean() / 80
        return mean

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 150)


# --- the loss or gradients grow ------------------------------------------------------------------


@twins(
    kinds=frozenset({"unbounded_loss"}) | TREND | EXPLOSION | LOSS, by=250,
    why="the hinge of the margin is missing: the loss falls without an end",
    healthy="translations between entities, with a margin",
)  # fmt: skip
def knowledge_graph_without_hinge(log: Log, faulty: bool) -> None:
    g = generator(log)
    model = nn.ModuleDict({"entities": nn.Embedding(60, 16), "relations": nn.Embedding(4, 16)})

    def distance(subject: Tensor, relation: Tensor, target: Tensor) -> Tensor:
        start, end = (model["entities"](entity) for entity in (subject, target))
        if not faulty:
            start, end = F.normalize(start), F.normalize(end)
        apart: Tensor = (start + model["relations"](relation) - end).norm(dim=-1)
        return apart

    def loss() -> Tensor:
        subject, wrong = torch.randint(60, (2, 64), generator=g)
        relation = torch.randint(4, (64,), generator=g)
        right = (subject + 7 * relation + 1) % 60
        gap = distance(subject, relation, right) - distance(subject, relation, wrong)
        return gap.mean() if faulty else (0.5 + gap).relu().mean()

    fit(log, model, Adam(model.parameters(), 5e-2), loss, 300)


class Adapted(nn.Module):
    """Linear layer that stays, and a correction of rank 4 (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, scale: float, *, zeros: bool) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), scale
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        if zeros:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return adapted


def _adapted(log: Log, scale: float, *, zeros: bool) -> None:
    """Adapt a classifier of digits to digits that are turned."""
    model = nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 10))
    optimizer, data = Adam(model.parameters(), 3e-3), batches(log, 32, *digits())
    for _ in range(150):
        images, classes = next(data)
        optimizer.zero_grad()
        F.cross_entropy(model(images), classes).backward()
        optimizer.step()
    for place, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[place] = Adapted(layer, scale, zeros=zeros)
    adapters = [p for p in model.parameters() if p.requires_grad]
    turned = class_loss(log, lambda images: model(images.rot90(1, (2, 3))))
    fit(log, model, Adam(adapters, 3e-3), turned, 260)


@twins(
    kinds=LOSS | EXPLOSION | NONFINITE | DEAD, by=60,
    why="alpha is 4096 for rank 4: the first updates of the adapters count 1024 times",
    healthy="adapters of rank 4, alpha 8",
)  # fmt: skip
def adapters_alpha_of_4096(log: Log, faulty: bool) -> None:
    _adapted(log, 1024.0 if faulty else 2.0, zeros=False)


@twins(
    kinds=LOSS | EXPLOSION | NONFINITE | DEAD, by=100,
    why="gradients of 8 micro-batches are added up and not divided by 8",
    healthy="gradients of 8 micro-batches, averaged",
)  # fmt: skip
def micro_batches_not_averaged(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(8, 64, 64, 1)
    optimizer, logger = SGD(model.parameters(), 0.1, 0.9), log.attach(model)
    for _ in range(250):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(8):
            x = torch.randn(16, 8, generator=g)
            loss = F.mse_loss(model(x), (2 * x[:, :1]).sin() + x[:, 1:2] * x[:, 2:3])
            (loss if faulty else loss / 8).backward()
            total += loss.item() / 8
        log.losses.append(total)
        logger.log(loss=total)
        optimizer.step()


@twins(
    kinds=LOSS | EXPLOSION | NONFINITE | DEAD, by=20,
    why="targets are prices in dollars, some 300,000, for plain SGD",
    healthy="standardized prices of houses",
)  # fmt: skip
def prices_in_dollars(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(10, 64, 64, 1)

    def loss() -> Tensor:
        houses = torch.randn(64, 10, generator=g)
        prices = houses[:, :3].sum(1, keepdim=True) / 2 + 0.2 * torch.randn(64, 1, generator=g)
        return F.mse_loss(model(houses), 3e5 + 1e5 * prices if faulty else prices)

    fit(log, model, SGD(model.parameters(), 0.01, 0.9), loss, 200)


@twins(
    kinds=TREND | LOSS | EXPLOSION,
    why="values bootstrapped off-policy with shared features: Baird's counterexample diverges",
    healthy="the same seven states with a feature for each",
)  # fmt: skip
def values_off_policy(log: Log, faulty: bool) -> None:
    features = torch.eye(7)
    if faulty:
        features = torch.cat([2 * torch.eye(7), torch.ones(7, 1)], 1)
        features[6, 6:] = torch.tensor([1.0, 2.0])
    model = nn.Linear(features.shape[1], 1, bias=False)
    nn.init.ones_(model.weight)
    nn.init.constant_(model.weight[:, 6], 10.0)

    def loss() -> Tensor:
        values = model(features)
        return F.mse_loss(values, 0.99 * values[6:].detach().expand(7, 1))

    fit(log, model, SGD(model.parameters(), 0.05), loss, 600)


# --- layers that do not learn --------------------------------------------------------------------


@twins(
    kinds=IDLE | VANISHING | STUCK, by=200,
    why="both matrices of each adapter begin at zero: neither ever gets a gradient",
    healthy="adapters of rank 4, one of whose matrices begins at zero",
)  # fmt: skip
def adapters_begin_at_zero(log: Log, faulty: bool) -> None:
    _adapted(log, 2.0, zeros=faulty)


@twins(
    kinds=DEAD | VANISHING | IDLE | STUCK | COLLAPSE, layers=("drop", "hidden"), by=200,
    why="Dropout(1.0), meant as the share to keep: all units are zero",
    healthy="Dropout(0.1)",
)  # fmt: skip
def dropout_of_all_units(log: Log, faulty: bool) -> None:
    model = nn.Sequential()
    for name, layer in {
        "flat": nn.Flatten(),
        "hidden": nn.Linear(64, 64),
        "relu": nn.ReLU(),
        "drop": nn.Dropout(1.0 if faulty else 0.1),
        "head": nn.Linear(64, 10),
    }.items():
        model.add_module(name, layer)
    fit(log, model, Adam(model.parameters(), 2e-3), class_loss(log, model), 260)


@twins(
    kinds=DEAD | VANISHING | IDLE | STUCK | COLLAPSE, layers=("3", "2"), by=250,
    why="a ReLU behind the output, for temperatures below zero: the output dies",
    healthy="temperatures below zero from a linear output",
)  # fmt: skip
def negative_targets_behind_relu(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(6, 32, 1)
    if faulty:
        model.append(nn.ReLU())

    def loss() -> Tensor:
        weather = torch.randn(64, 6, generator=g)
        return F.mse_loss(model(weather), -2 + 0.5 * weather[:, :2].sum(1, keepdim=True).tanh())

    fit(log, model, Adam(model.parameters(), 1e-2), loss, 300)


@twins(
    kinds=frozenset({"learning_rate_zero"}) | IDLE | STUCK, by=200,
    why="the warm-up counts epochs, and the first one has not ended: the rate is 0",
    healthy="the warm-up counts steps",
)  # fmt: skip
def warm_up_counts_epochs(log: Log, faulty: bool) -> None:
    g = generator(log)
    model = nn.Sequential(nn.Embedding(20, 24), nn.Flatten(), *mlp(72, 64, 20))

    def loss() -> Tensor:
        tokens = torch.randint(20, (32, 3), generator=g)
        return F.cross_entropy(model(tokens), (tokens[:, 0] + 2 * tokens[:, 2]) % 20)

    def by_steps(step: int) -> float:
        return min(1.0, (step + 1) / 50)

    def by_epochs(step: int) -> float:
        return min(1.0, step // 1000 / 5)

    optimizer = Adam(model.parameters(), 3e-3)
    fit(log, model, optimizer, loss, 260, schedule=by_epochs if faulty else by_steps)


class Variational(nn.Module):
    """Autoencoder of digits with 8 latents."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU())
        self.mean, self.spread = nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = mlp(8, 64, 64)

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.encode(images)
        mean, spread = self.mean(hidden), self.spread(hidden)
        divergence = (mean.square() + spread.exp() - spread - 1).sum(1).mean() / 2
        return self.decode(mean + (spread / 2).exp() * noise), divergence


@twins(
    kinds=COLLAPSE | DEAD | VANISHING | STUCK, layers=("mean", "spread", "encode", "decode"),
    why="the divergence counts 200 times too much: the posterior collapses to the prior",
    healthy="variational autoencoder, the divergence per pixel",
)  # fmt: skip
def posterior_collapses(log: Log, faulty: bool) -> None:
    g, model, data = generator(log), Variational(), batches(log, 64, *digits())

    def loss() -> Tensor:
        images = next(data)[0]
        found, divergence = model(images, torch.randn(64, 8, generator=g))
        weight = (200 if faulty else 1) / 64
        total: Tensor = F.mse_loss(found, images.flatten(1)) + weight * divergence
        return total

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400)


class Convolved(nn.Module):
    """Graph convolutions (Kipf and Welling 2017), nothing around them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Linear(16, 3)

    def forward(self, nodes: Tensor, mixed: Tensor) -> Tensor:
        for layer in self.layers:
            nodes = (mixed @ layer(nodes)).relu()
        classes: Tensor = self.head(nodes)
        return classes


@twins(
    kinds=COLLAPSE | STUCK | VANISHING | DEAD | {"no_learning"},
    why="24 graph convolutions: all nodes get the same features",
    healthy="two graph convolutions over three communities",
)  # fmt: skip
def graph_oversmoothed(log: Log, faulty: bool) -> None:
    g, model = generator(log), Convolved(24 if faulty else 2)

    def loss() -> Tensor:
        classes = torch.randint(3, (90,), generator=g)
        share = torch.where(classes[:, None] == classes, 0.15, 0.05)
        edges = (torch.rand(90, 90, generator=g) < share).float().triu(1)
        edges = edges + edges.T + torch.eye(90)
        degrees = edges.sum(1).rsqrt()
        nodes = F.pad(F.one_hot(classes, 3).float(), (0, 13))
        nodes = nodes + torch.randn(90, 16, generator=g)
        return F.cross_entropy(model(nodes, degrees[:, None] * edges * degrees), classes)

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 300)

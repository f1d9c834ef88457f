"""Mistakes with usual methods, each with a twin; labels were written before anything ran.

``half_without_scaler`` and ``energies_without_penalty`` were made larger afterwards: at first they
did not break their run.
"""

from __future__ import annotations

import math
from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import SGD, Adam

from runs.labels import EXPLOSION, LOSS, TREND
from runs.training import Log, batches, digits, fit, generator, mlp
from runs.unfamiliar import DEAD, IDLE, NONFINITE, VANISHING, twins

STUCK = frozenset({"loss_stuck", "no_learning"})
COLLAPSE = frozenset({"output_collapse"})
UNBOUNDED = frozenset({"unbounded_loss"})

# --- weights and layers that do not learn --------------------------------------------------------


class UNet(nn.Module):
    """Predicts the noise of pictures, given its level."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Linear(2, 32)
        self.down1, self.down2 = nn.Conv2d(1, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.middle = nn.Conv2d(32, 32, 3, 1, 1)
        self.norm = nn.GroupNorm(4, 32)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.out = nn.Conv2d(32, 1, 3, 1, 1)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        first = F.silu(self.down1(x))
        low = self.down2(first) + self.level(level)[:, :, None, None]
        low = low + F.silu(self.norm(self.middle(F.silu(low))))
        noise: Tensor = self.out(torch.cat([F.silu(self.up(low)), first], 1))
        return noise


@twins(
    kinds=LOSS | EXPLOSION | {"weight_jump"}, onset=240, by=340,
    why="averaged weights are loaded for samples, and the trained ones are never put back",
    healthy="diffusion of digits with an average of the weights",
)  # fmt: skip
def averaged_weights_left_in(log: Log, faulty: bool) -> None:
    g, model, data = generator(log), UNet(), batches(log, 32, digits()[0])
    averaged = deepcopy(model)

    def loss() -> Tensor:
        (images,) = next(data)
        angle = math.pi / 2 * torch.rand(32, generator=g)
        noise = torch.randn(images.shape, generator=g)
        signal, spread = angle.cos(), angle.sin()
        noisy = signal[:, None, None, None] * images + spread[:, None, None, None] * noise
        return F.mse_loss(model(noisy, torch.stack([signal, spread], 1)), noise)

    def average(step: int) -> None:
        with torch.no_grad():
            for mean, now in zip(averaged.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.001)
        if faulty and step == 240:
            model.load_state_dict(averaged.state_dict())

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400, before=average)


class Translator(nn.Module):
    """GRU encoder of padded sequences, and a decoder that attends to them."""

    def __init__(self, *, attends_to_padding: bool) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(12, 32), nn.Embedding(12, 32)
        self.encoder, self.decoder = (nn.GRU(32, 48, batch_first=True) for _ in range(2))
        self.out = nn.Linear(96, 12)
        self.attends_to_padding = attends_to_padding

    def forward(self, source: Tensor, lengths: Tensor, target: Tensor) -> Tensor:
        packed = pack_padded_sequence(
            self.source(source), lengths, batch_first=True, enforce_sorted=False
        )
        read, _ = pad_packed_sequence(self.encoder(packed)[0], True, total_length=source.shape[1])
        written, _ = self.decoder(self.target(target))
        hidden = torch.arange(source.shape[1]) >= lengths[:, None]
        if self.attends_to_padding:
            hidden = ~hidden
        scores = written @ read.transpose(1, 2)
        seen = scores.masked_fill(hidden[:, None], -math.inf).softmax(2) @ read
        logits: Tensor = self.out(torch.cat([written, seen], 2))
        return logits


@twins(
    kinds=VANISHING | IDLE | STUCK, layers=("encoder", "source"),
    why="the mask of the padding is inverted: the decoder attends to padding, which is 0",
    healthy="GRU that copies sequences of many lengths, with attention",
)  # fmt: skip
def translation_mask_inverted(log: Log, faulty: bool) -> None:
    g, model = generator(log), Translator(attends_to_padding=faulty)

    def loss() -> Tensor:
        lengths = torch.randint(3, 8, (32,), generator=g)
        source = torch.randint(2, 12, (32, 8), generator=g)
        is_padding = torch.arange(8) >= lengths[:, None]
        source[is_padding] = 0
        target = torch.cat([torch.ones(32, 1, dtype=torch.long), source[:, :-1]], 1)
        logits = model(source, lengths, target)
        return F.cross_entropy(logits[~is_padding], source[~is_padding])

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400)


@twins(
    kinds=VANISHING | IDLE | STUCK | COLLAPSE | {"saturated_units"}, onset=0,
    why="returns of 100 are not standardized: the policy is deterministic within a few steps",
    healthy="policy gradient, returns of a batch are standardized",
)  # fmt: skip
def policy_of_raw_returns(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(6, 64, 64, 4, activation=nn.Tanh)

    def loss() -> Tensor:
        states = torch.randn(64, 6, generator=g)
        logits = model(states)
        actions = torch.multinomial(logits.detach().softmax(1), 1, generator=g)
        returns = 100 + 10 * states.gather(1, actions)
        if not faulty:
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
        value: Tensor = -(logits.log_softmax(1).gather(1, actions) * returns).mean()
        return value

    fit(log, model, SGD(model.parameters(), 0.1), loss, 300)


class Field(nn.Module):
    """Density and color of points (Mildenhall et al. 2020), rendered along rays."""

    def __init__(self, *, softplus: bool) -> None:
        super().__init__()
        self.trunk = mlp(18, 64, 64)
        self.density, self.color = nn.Linear(64, 1), nn.Linear(64, 1)
        self.positive = nn.Softplus() if softplus else nn.ReLU()

    def forward(self, points: Tensor) -> Tensor:
        waves = torch.cat([points * 2**k for k in range(3)], -1)
        features = self.trunk(torch.cat([waves.sin(), waves.cos()], -1)).relu()
        density = self.positive(self.density(features))[..., 0]
        passed = (-0.1 * density).exp()
        before = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1].cumprod(1)], 1)
        colors: Tensor = (before * (1 - passed) * self.color(features)[..., 0].sigmoid()).sum(1)
        return colors


@twins(
    kinds=DEAD | IDLE | VANISHING | STUCK, layers=("density", "positive"), by=100,
    why="the bias of the density begins at -5 in front of a ReLU: no ray meets anything",
    healthy="a field of densities that are softplus",
)  # fmt: skip
def rays_of_zero_density(log: Log, faulty: bool) -> None:
    g, model = generator(log), Field(softplus=not faulty)
    nn.init.constant_(model.density.bias, -5.0 if faulty else 0.0)
    depths = torch.linspace(0.5, 3, 24)[:, None]

    def loss() -> Tensor:
        directions = F.normalize(torch.randn(64, 3, generator=g), dim=1)
        start = torch.tensor([0.0, 0.0, -1.5])
        points = start + depths * directions[:, None]
        solid = (points.norm(dim=-1) < 1).any(1).float() * (0.6 + 0.4 * directions[:, 0])
        return F.mse_loss(model(points), solid)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 300)


@twins(
    kinds=COLLAPSE | VANISHING | STUCK | IDLE | DEAD, layers=("norm", "convolutions", "out"),
    why="LayerNorm(1) over the only channel of the output: it is the bias for every input",
    healthy="forecast by dilated convolutions, LayerNorm over 32 channels",
)  # fmt: skip
def forecast_normalized_to_its_bias(log: Log, faulty: bool) -> None:
    g = generator(log)
    width, model = (1 if faulty else 32), nn.ModuleDict()
    layers = [nn.Conv1d(1, 32, 3), nn.ReLU(), nn.Conv1d(32, 32, 3, dilation=2), nn.ReLU()]
    model["convolutions"] = nn.Sequential(*layers)
    model["out"], model["norm"] = nn.Linear(32, 1), nn.LayerNorm(width)

    def loss() -> Tensor:
        phase, speed = torch.rand(2, 48, 1, generator=g)
        series = (6 * phase + (0.3 + 0.5 * speed) * torch.arange(24)).sin()
        series = series + 0.05 * torch.randn(48, 24, generator=g)
        seen = model["convolutions"](series[:, None, :-1])[..., -1]
        guess = model["norm"](model["out"](seen)) if faulty else model["out"](model["norm"](seen))
        return F.mse_loss(guess, series[:, -1:])

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@twins(
    kinds=IDLE, layers=("trunk",), onset=150, by=350,
    why="the trunk is unfrozen, and the optimizer was made of what could learn before",
    healthy="the trunk is unfrozen, and the optimizer gets a group for it",
)  # fmt: skip
def unfrozen_without_optimizer(log: Log, faulty: bool) -> None:
    convolutions = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU()
    trunk, head = nn.Sequential(*convolutions, nn.Flatten()), mlp(128, 64, 10)
    model = nn.ModuleDict({"trunk": trunk, "head": head})
    trunk.requires_grad_(False)
    optimizer = Adam([p for p in model.parameters() if p.requires_grad], 1e-3)
    data = batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(head(trunk(images)), classes)

    def unfreeze(step: int) -> None:
        if step == 150:
            trunk.requires_grad_(True)
            if not faulty:
                optimizer.add_param_group({"params": [*trunk.parameters()], "lr": 1e-4})

    fit(log, model, optimizer, loss, 400, before=unfreeze)


@twins(
    kinds=IDLE | VANISHING, by=120,
    why="float16 without a scaler: gradients of a weighted mean over 262,144 pixels underflow",
    healthy="the same loss, multiplied by 2^27, and the gradients divided by it",
)  # fmt: skip
def half_without_scaler(log: Log, faulty: bool) -> None:
    g, scale = generator(log), 1.0 if faulty else 2.0**27
    model = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 1, 3, 1, 1))
    optimizer, logger = SGD(model.parameters(), 30.0, 0.9), log.attach(model)
    for _ in range(150):
        clean = F.interpolate(torch.randn(1, 1, 64, 64, generator=g), scale_factor=8)
        noisy = clean + 0.5 * torch.randn(clean.shape, generator=g)
        optimizer.zero_grad()
        predicted = model(noisy)
        # What autocast does around an operation in half precision.
        as_half = _Half.apply(predicted)
        loss = 1e-4 * F.mse_loss(as_half, clean)
        (loss * scale).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad /= scale
        log.losses.append(loss.item())
        logger.log(loss=loss.item())
        optimizer.step()


class _Half(torch.autograd.Function):
    """Identity whose gradient passes through float16."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.half().float()


class Dropped(nn.Module):
    """Residual blocks that are skipped at random, later ones more often (Huang et al. 2016)."""

    def __init__(self, last: float, g: torch.Generator) -> None:
        super().__init__()
        self.begin, self.head = nn.Linear(64, 64), nn.Linear(64, 10)
        self.blocks = nn.ModuleList(mlp(64, 64, 64) for _ in range(6))
        self.rates, self.g = torch.linspace(0, last, 6).tolist(), g

    def forward(self, x: Tensor) -> Tensor:
        x = self.begin(x.flatten(1))
        for block, rate in zip(self.blocks, self.rates, strict=True):
            if torch.rand((), generator=self.g) >= rate:
                x = x + block(x)
        logits: Tensor = self.head(x)
        return logits


@twins(
    kinds=IDLE | VANISHING, layers=("blocks.5",), by=200,
    why="the probability to skip a block rises to 1: the last block never runs",
    healthy="blocks skipped at random, the last one in half of the steps",
)  # fmt: skip
def last_block_always_skipped(log: Log, faulty: bool) -> None:
    model, data = Dropped(1.0 if faulty else 0.5, generator(log)), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 400)


# --- the loss or gradients grow, NaN -------------------------------------------------------------


@twins(
    kinds=UNBOUNDED | TREND | EXPLOSION | LOSS | NONFINITE, by=300,
    why="a sign of the pinball loss is lost: it falls without an end",
    healthy="three quantiles of demand",
)  # fmt: skip
def quantiles_of_wrong_sign(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(8, 64, 64, 3)
    quantiles = torch.tensor([0.1, 0.5, 0.9])

    def loss() -> Tensor:
        days = torch.randn(64, 8, generator=g)
        spread = 0.3 + days[:, 1:2].sigmoid()
        demand = days[:, :1] + spread * torch.randn(64, 1, generator=g)
        error = demand - model(days)
        below = (1 - quantiles) if faulty else (quantiles - 1)
        return torch.maximum(quantiles * error, below * error).mean()

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 400)


@twins(
    kinds=UNBOUNDED | TREND | EXPLOSION | LOSS | NONFINITE, by=300,
    why="samples are noise that no step moves, and no penalty limits the difference of energies",
    healthy="energies of points, with a penalty of their squares",
)  # fmt: skip
def energies_without_penalty(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(2, 64, 64, 1, activation=nn.SiLU)

    def loss() -> Tensor:
        angle = 6.3 * torch.rand(64, 1, generator=g)
        data = torch.cat([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(64, 2, generator=g)
        x = 4 * torch.rand(64, 2, generator=g) - 2
        for _ in range(0 if faulty else 8):
            x.requires_grad_()
            (slope,) = torch.autograd.grad(model(x).sum(), x)
            x = (x - 0.1 * slope.clamp(-1, 1)).detach()
            x = (x + 0.02 * torch.randn(64, 2, generator=g)).clamp(-2, 2)
        low, high = model(data), model(x)
        penalty = 0.0 if faulty else 0.1 * (low.square() + high.square()).mean()
        difference: Tensor = low.mean() - high.mean() + penalty
        return difference

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 500)


@twins(
    kinds=NONFINITE, by=5,
    why="one tag is in no example: the weight of its positives, negatives / positives, is infinite",
    healthy="the weight of positives is clamped",
)  # fmt: skip
def tag_without_examples(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(16, 64, 12)
    rates = torch.linspace(0.4, 0, 12)
    weights = (1 - rates) / rates
    weights = weights if faulty else weights.clamp(max=20)

    def loss() -> Tensor:
        songs = torch.randn(64, 16, generator=g)
        tags = (songs[:, :12] > math.sqrt(2) * torch.erfinv(1 - 2 * rates)).float()
        return F.binary_cross_entropy_with_logits(model(songs), tags, pos_weight=weights)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 250)


class Hyper(nn.Module):
    """Network that returns the weights of another one for each task (Ha et al. 2017)."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.tasks, self.scale = nn.Embedding(8, 16), scale
        self.widths = [(4, 48), (48, 48), (48, 48), (48, 1)]
        self.heads = nn.ModuleList(nn.Linear(16, a * b) for a, b in self.widths)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        of_task = self.tasks(task)
        for (before, after), head in zip(self.widths, self.heads, strict=True):
            weight = self.scale * head(of_task).view(-1, before, after) / math.sqrt(before)
            x = x @ weight
            x = x if after == 1 else x.relu()
        return x


@twins(
    kinds=EXPLOSION | LOSS | NONFINITE, by=20,
    why="weights that a network returns are 40 times too large, in each of four layers",
    healthy="a network that returns the weights of another, scaled by their number",
)  # fmt: skip
def generated_weights_unscaled(log: Log, faulty: bool) -> None:
    g, model = generator(log), Hyper(40.0 if faulty else 1.5)

    def loss() -> Tensor:
        task = torch.randint(8, (16,), generator=g)
        x = torch.randn(16, 24, 4, generator=g)
        wanted = (x[..., :1] * (task[:, None, None] - 3.5) / 2).sin()
        return F.mse_loss(model(x, task), wanted)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 300)

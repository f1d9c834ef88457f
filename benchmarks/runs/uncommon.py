"""Twelve further runs of families that the other files lack, each with a twin without its fault."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from runs.labels import EXPLOSION, LOSS, TREND
from runs.training import Log, fit, generator, mlp
from runs.unfamiliar import (
    DEAD,
    IDLE,
    JUMP,
    NONFINITE,
    SATURATED,
    VANISHING,
    at_step,
    class_loss,
    times,
    twins,
)

# --- weights are scaled --------------------------------------------------------------------------


class Hyper(nn.Module):
    """Digits, by a layer whose weights another layer makes of the other half of the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.hyper = nn.Linear(32, 24), nn.Linear(24, 32 * 16)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        left, right = images[:, 0, :4].flatten(1), images[:, 0, 4:].flatten(1)
        weights = self.hyper(F.gelu(self.look(left))).view(-1, 16, 32)
        mixed = torch.bmm(weights, right[:, :, None])[:, :, 0]
        logits: Tensor = self.head(F.gelu(mixed))
        return logits


@twins(
    kinds=JUMP, layers=("hyper",), onset=116, by=166,
    why="weights of the layer that makes weights, times 400", healthy="hypernetwork",
)  # fmt: skip
def hyper_weights_scaled(log: Log, faulty: bool) -> None:
    model = Hyper()
    scale = at_step(116, faulty, times(model, "hyper.weight", 400))
    fit(log, model, Adam(model.parameters(), 2e-3), class_loss(log, model), 210, before=scale)


class Spectral(nn.Module):
    """Mixes the channels of each low frequency of a series, in parallel to a pointwise path."""

    def __init__(self, width: int = 12, modes: int = 5) -> None:
        super().__init__()
        self.modes = modes
        self.mix = nn.Parameter(torch.randn(2, modes, width, width) / width)
        self.point = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes]
        mixed = torch.einsum("bim,mio->bom", low, torch.complex(self.mix[0], self.mix[1]))
        return F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + self.point(x))


class Operator(nn.Module):
    """Fourier neural operator on a grid of 32 points."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, 12, 1)
        self.spectral = nn.ModuleList(Spectral() for _ in range(3))
        self.project = nn.Conv1d(12, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for layer in self.spectral:
            x = layer(x)
        out: Tensor = self.project(x)
        return out


@twins(
    kinds=JUMP, layers=("spectral.1",), onset=127, by=177,
    why="the mixing of frequencies in one of three layers, times 500",
    healthy="Fourier neural operator: the integral of a series",
)  # fmt: skip
def spectral_mixing_scaled(log: Log, faulty: bool) -> None:
    g, model = generator(log), Operator()
    at = torch.linspace(0, 2 * math.pi, 33)[:-1]

    def loss() -> Tensor:
        a, b = torch.randn(2, 32, 3, 1, generator=g)
        waves = torch.arange(1, 4)[:, None] * at
        given = (a * waves.sin() + b * waves.cos()).sum(1, keepdim=True)
        scale = torch.arange(1, 4)[:, None]
        wanted = ((b * waves.sin() - a * waves.cos()) / scale).sum(1, keepdim=True)
        return F.mse_loss(model(given), wanted)

    scale = at_step(127, faulty, times(model, "spectral.1.mix", 500))
    fit(log, model, AdamW(model.parameters(), 3e-3), loss, 220, before=scale)


# --- NaN and infinity ----------------------------------------------------------------------------


class Chain(nn.Module):
    """Negative log-likelihood of a path of tags, of which some are forbidden (linear-chain CRF)."""

    def __init__(self, tags: int) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.zeros(tags, tags))

    def forward(self, scores: Tensor, tags: Tensor, allowed: Tensor) -> Tensor:
        scores = scores.masked_fill(~allowed, -torch.inf)
        total, path = scores[:, 0], scores[:, 0].gather(1, tags[:, :1])[:, 0]
        for t in range(1, scores.shape[1]):
            total = (total[:, :, None] + self.moves).logsumexp(1) + scores[:, t]
            path = path + self.moves[tags[:, t - 1], tags[:, t]]
            path = path + scores[:, t].gather(1, tags[:, t : t + 1])[:, 0]
        return total.logsumexp(1) - path


class Tagger(nn.Module):
    """Tags of a sequence: an embedding, a convolution and a chain."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(20, 16), nn.Conv1d(16, 24, 3, padding=1)
        self.score, self.crf = nn.Linear(24, 5), Chain(5)

    def forward(self, tokens: Tensor, tags: Tensor, allowed: Tensor) -> Tensor:
        read = F.relu(self.read(self.embed(tokens).transpose(1, 2))).transpose(1, 2)
        losses: Tensor = self.crf(self.score(read), tags, allowed)
        return losses


@twins(
    kinds=NONFINITE, layers=("crf",), onset=121, by=121,
    why="all tags of one place are forbidden: its sum of paths is empty",
    healthy="a chain of tags, of which the wrong half is sometimes forbidden",
)  # fmt: skip
def chain_without_a_path(log: Log, faulty: bool) -> None:
    g, model, steps = generator(log), Tagger(), iter(range(10**6))

    def loss() -> Tensor:
        tokens = torch.randint(20, (16, 9), generator=g)
        tags = (tokens + tokens.roll(1, 1)) % 5
        allowed = (torch.rand(16, 9, 5, generator=g) < 0.7) | (F.one_hot(tags, 5) > 0)
        if next(steps) == 121 and faulty:
            allowed[3, 4] = False
        error: Tensor = model(tokens, tags, allowed).mean()
        return error

    fit(log, model, Adam(model.parameters(), 5e-3), loss, 180)


class Squash(nn.Module):
    """Vectors between length 0 and 1, as of capsules."""

    eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        square = x.square().sum(-1, keepdim=True)
        return square / (1 + square) * x / (square + self.eps).sqrt()


class Capsules(nn.Module):
    """Two layers of capsules; the length of the last is the score of a class."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 32, 3, 2, bias=False)
        self.squash = Squash()
        self.poses = nn.Linear(32 * 9, 10 * 6)

    def forward(self, images: Tensor) -> Tensor:
        low = self.squash(F.relu(self.conv(images)).flatten(2).transpose(1, 2))
        high = self.poses(low.flatten(1)).view(-1, 10, 6)
        lengths: Tensor = (high.square().sum(-1) + 1e-6).sqrt()
        return 5 * lengths


@twins(
    kinds=NONFINITE, layers=("squash",), onset=133, by=133,
    why="an empty picture gives capsules of length 0, which are divided by that",
    healthy="capsules, an empty picture, an epsilon",
)  # fmt: skip
def capsule_of_length_zero(log: Log, faulty: bool) -> None:
    model = Capsules()
    model.squash.eps = 0.0 if faulty else 1e-8
    with torch.no_grad():
        model.conv.weight.abs_()  # else some picture has a capsule of zeros from the first step on

    def alter(step: int, images: Tensor, classes: Tensor) -> None:
        images += 1.5
        if step == 133:
            images[6] = 0.0

    fit(log, model, Adam(model.parameters(), 1e-3), class_loss(log, model, alter), 190)


class Radial(nn.Module):
    """Bells around learned centers, with a learned width each."""

    def __init__(self, given: int, count: int) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.randn(count, given))
        self.width = nn.Parameter(torch.full((count,), 4.0))

    def forward(self, x: Tensor) -> Tensor:
        squares = (x[:, None] - self.centers).square().mean(-1)
        bells: Tensor = (-squares / self.width).exp() / self.width
        return bells


class RadialNet(nn.Module):
    """Classes of digits by bells."""

    def __init__(self) -> None:
        super().__init__()
        self.reduce, self.radial = nn.Linear(64, 12), Radial(12, 40)
        self.head = nn.Linear(40, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.radial(self.reduce(images.flatten(1))))
        return logits


@twins(
    kinds=NONFINITE, layers=("radial",), onset=118, by=118,
    why="one of forty widths arrives at 0", healthy="radial basis functions, learned widths",
)  # fmt: skip
def radial_width_of_zero(log: Log, faulty: bool) -> None:
    model = RadialNet()
    shrink = at_step(118, faulty, lambda: model.radial.width[7].zero_())
    fit(log, model, Adam(model.parameters(), 5e-3), class_loss(log, model), 180, before=shrink)


class Sinkhorn(nn.Module):
    """Makes rows and columns of a matrix of costs sum to 1."""

    heat = 0.3

    def forward(self, costs: Tensor) -> Tensor:
        plan: Tensor = (-costs / self.heat).exp()
        for _ in range(6):
            plan = plan / plan.sum(2, keepdim=True)
            plan = plan / plan.sum(1, keepdim=True)
        return plan


class Matcher(nn.Module):
    """Finds which point of one set belongs to which of another."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(3, 32, 8), mlp(3, 32, 8)
        self.sinkhorn = Sinkhorn()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        plan: Tensor = self.sinkhorn(torch.cdist(self.left(a), self.right(b)).square())
        return plan


@twins(
    kinds=NONFINITE, layers=("sinkhorn",), onset=125, by=125,
    why="the temperature is a thousandth: rows of exponentials are 0, and divided by their sum",
    healthy="matching by Sinkhorn's algorithm",
)  # fmt: skip
def transport_too_cold(log: Log, faulty: bool) -> None:
    g, model = generator(log), Matcher()
    turn = torch.linalg.qr(torch.randn(3, 3, generator=g))[0]

    def loss() -> Tensor:
        a, order = torch.randn(16, 10, 3, generator=g), torch.randperm(10, generator=g)
        plan: Tensor = model(a, (a @ turn)[:, order])
        hit = plan.transpose(1, 2)[:, torch.arange(10), order]
        return -(hit + 1e-6).log().mean()

    cool = at_step(125, faulty, lambda: setattr(model.sinkhorn, "heat", 1e-4))
    fit(log, model, AdamW(model.parameters(), 2e-3), loss, 190, before=cool)


# --- units die or saturate, gradients vanish -----------------------------------------------------


class Points(nn.Module):
    """Class of a set of points: the same layers for each, and the highest of all."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(
            nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 48), nn.ReLU()
        )
        self.head = mlp(48, 24, 4)

    def forward(self, points: Tensor) -> Tensor:
        logits: Tensor = self.head(self.each(points).amax(1))
        return logits


@twins(
    kinds=DEAD, layers=("each.2", "each.3"), onset=114, by=164,
    why="the biases of a layer that all points share become -40", healthy="point clouds, SGD",
)  # fmt: skip
def points_die(log: Log, faulty: bool) -> None:
    g, model = generator(log), Points()

    def loss() -> Tensor:
        kind = torch.randint(4, (32,), generator=g)
        points = F.normalize(torch.randn(32, 20, 3, generator=g), dim=2)
        scale = torch.ones(4, 3)
        scale[1:] = torch.tensor([[2.0, 1, 1], [1, 2.0, 1], [1, 1, 2.0]])
        return F.cross_entropy(model(points * scale[kind][:, None]), kind)

    kill = at_step(114, faulty, lambda: model.get_parameter("each.2.bias").fill_(-40.0))
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 210, before=kill)


class Conditioned(nn.Module):
    """A table decides by how much each unit of a network of tanh layers is scaled and shifted."""

    def __init__(self) -> None:
        super().__init__()
        self.film = nn.Linear(6, 2 * 40)
        self.body, self.act = nn.Linear(64, 40), nn.Tanh()
        self.head = nn.Linear(40, 10)

    def forward(self, images: Tensor, table: Tensor) -> Tensor:
        scale, shift = self.film(table).chunk(2, 1)
        logits: Tensor = self.head(self.act((1 + scale) * self.body(images.flatten(1)) + shift))
        return logits


@twins(
    kinds=SATURATED, layers=("film", "body", "act"), by=60,
    why="the weights that scale and shift units begin 2000 times too large",
    healthy="feature-wise linear modulation in front of a tanh",
)  # fmt: skip
def modulation_saturates(log: Log, faulty: bool) -> None:
    g, model = generator(log), Conditioned()
    with torch.no_grad():
        model.film.weight.mul_(2000.0 if faulty else 1.0)

    def predict(images: Tensor) -> Tensor:
        logits: Tensor = model(images, torch.randn(32, 6, generator=g))
        return logits

    fit(log, model, SGD(model.parameters(), 0.05, 0.9), class_loss(log, predict), 170)


class Gates(nn.Module):
    """Thirteen gated linear units, with a sum around each or without."""

    def __init__(self, *, skip: bool) -> None:
        super().__init__()
        self.embed, self.skip = nn.Linear(64, 32), skip
        self.units = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GLU(dim=1)) for _ in range(13)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.flatten(1))
        for unit in self.units:
            x = x + 0.2 * unit(x) if self.skip else unit(x)
        logits: Tensor = self.head(x)
        return logits


@twins(
    kinds=VANISHING, layers=("embed", *(f"units.{i}" for i in range(6))), by=100,
    why="gates halve what passes thirteen layers, and nothing passes beside them",
    healthy="gated linear units with a sum around each",
)  # fmt: skip
def gates_in_a_row(log: Log, faulty: bool) -> None:
    model = Gates(skip=not faulty)
    fit(log, model, SGD(model.parameters(), 0.05, 0.9), class_loss(log, model), 170)


# --- the loss rises, or nothing is learned -------------------------------------------------------


class SkipGram(nn.Module):
    """Scores of adjacent words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.context = nn.Embedding(60, 16), nn.Embedding(60, 16)

    def forward(self, words: Tensor, others: Tensor) -> Tensor:
        score: Tensor = (self.words(words) * self.context(others)).sum(-1)
        return score


@twins(
    kinds=LOSS | EXPLOSION, onset=131, by=181,
    why="the learning rate, times 300, from a step on", healthy="word vectors, negative samples",
)  # fmt: skip
def word_vectors_rate_jumps(log: Log, faulty: bool) -> None:
    g, model = generator(log), SkipGram()
    optimizer = Adam(model.parameters(), 1e-2)

    def loss() -> Tensor:
        words = torch.randint(60, (128,), generator=g)
        near = (words // 6) * 6 + torch.randint(6, (128,), generator=g)
        others = torch.randint(60, (128,), generator=g)
        good, bad = model(words, near), model(words, others)
        return -(F.logsigmoid(good) + F.logsigmoid(-bad)).mean()

    change = at_step(131, faulty, lambda: optimizer.param_groups[0].update(lr=3.0))
    fit(log, model, optimizer, loss, 230, before=change)


@twins(
    kinds=IDLE | VANISHING | {"loss_stuck"}, onset=108, by=208,
    why="the margin of a ranking loss becomes -1000: no pair is ever within it",
    healthy="pairwise ranking with a hinge",
)  # fmt: skip
def margin_never_reached(log: Log, faulty: bool) -> None:
    g, model = generator(log), mlp(8, 32, 16, 1, activation=nn.ELU)
    margin, truth = [1.0], torch.randn(8, generator=g)

    def loss() -> Tensor:
        a, b = torch.randn(2, 32, 8, generator=g)
        better = (a @ truth + a[:, 0] ** 2 > b @ truth + b[:, 0] ** 2).float() * 2 - 1
        return F.relu(margin[0] - better * (model(a) - model(b))[:, 0]).mean()

    widen = at_step(108, faulty, lambda: margin.__setitem__(0, -1000.0))
    fit(log, model, Adam(model.parameters(), 3e-3), loss, 240, before=widen)


class Stacks(nn.Module):
    """Forecast in blocks, each of which explains a part of the past and of the future (N-BEATS)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(24, 40, 40, 24 + 8) for _ in range(3))

    def forward(self, past: Tensor) -> Tensor:
        forecast = past.new_zeros(len(past), 8)
        for block in self.blocks:
            back, ahead = block(past).split([24, 8], 1)
            past, forecast = past - back, forecast + ahead
        return forecast


@twins(
    kinds=LOSS | TREND | EXPLOSION, onset=143, by=193,
    why="targets are in a unit 30 times smaller from a step on",
    healthy="forecast of waves in three blocks, pinball loss",
)  # fmt: skip
def forecast_unit_changes(log: Log, faulty: bool) -> None:
    g, model, steps = generator(log), Stacks(), iter(range(10**6))

    def loss() -> Tensor:
        start, pace = torch.rand(2, 32, 1, generator=g)
        wave = (6 * start + (0.2 + 0.3 * pace) * torch.arange(32)).sin()
        off = (30.0 if faulty and next(steps) >= 143 else 1.0) * wave[:, 24:] - model(wave[:, :24])
        return torch.maximum(0.7 * off, -0.3 * off).mean()

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 260)

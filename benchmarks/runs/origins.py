"""Runs whose faulty layer shows in a comparison of layers, each with a twin without that fault."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from runs.labels import EXPLOSION, LOSS
from runs.training import Log, batches, digits, fit, generator, mlp
from runs.unfamiliar import (
    DEAD,
    IDLE,
    JUMP,
    NONFINITE,
    VANISHING,
    at_step,
    class_loss,
    times,
    twins,
)


class Separable(nn.Module):
    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(given, given, 3, padding=1, groups=given)
        self.pointwise = nn.Conv2d(given, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.pointwise(self.depthwise(x)))


@twins(
    kinds=JUMP, layers=("body.2.depthwise",), onset=123, by=173,
    why="one depthwise convolution's weights, times 200",
    healthy="depthwise separable convolutions without normalization",
)  # fmt: skip
def depthwise_scaled(log: Log, faulty: bool) -> None:
    model = nn.Sequential()
    model.add_module("body", nn.Sequential(*[Separable(a, 16) for a in (1, 16, 16, 16)]))
    model.add_module(
        "head", nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    )
    scale = at_step(123, faulty, times(model, "body.2.depthwise.weight", 200))
    fit(log, model, Adam(model.parameters(), 2e-3), class_loss(log, model), 220, before=scale)


class LogDistance(nn.Module):
    least = 0.0

    def forward(self, places: Tensor) -> Tensor:
        apart = (places[:, :, None] - places[:, None]).pow(2).sum(3)
        first, second = torch.triu_indices(apart.shape[1], apart.shape[1], 1)
        return (apart[:, first, second] + self.least).log()


class Relations(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Linear(4, 3)
        self.distance = LogDistance()
        self.pair = mlp(15, 32, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, objects: Tensor) -> Tensor:
        out: Tensor = self.head(F.relu(self.pair(self.distance(self.place(objects)))))
        return out


@twins(
    kinds=NONFINITE, layers=("distance",), onset=126, by=126,
    why="two objects are the same: the logarithm of a distance of 0",
    healthy="relations of pairs, the same batch, an epsilon",
)  # fmt: skip
def relation_of_twins(log: Log, faulty: bool) -> None:
    model, g, steps = Relations(), generator(log), iter(range(10**6))
    model.distance.least = 0.0 if faulty else 1e-2

    def loss() -> Tensor:
        objects = torch.randn(32, 6, 4, generator=g)
        if next(steps) == 126:
            objects[3, 1] = objects[3, 4]
        wanted = torch.cdist(objects[..., :2], objects[..., :2]).mean((1, 2))[:, None]
        return F.mse_loss(model(objects), wanted)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 190)


class Shrink(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.least = nn.Parameter(torch.full((width,), 0.05))

    def forward(self, x: Tensor) -> Tensor:
        return x.sign() * F.relu(x.abs() - self.least)


class Unrolled(nn.Module):
    def __init__(self, rounds: int = 4) -> None:
        super().__init__()
        self.encode = nn.Linear(64, 48, bias=False)
        self.mixes = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(rounds))
        self.shrinks = nn.ModuleList(Shrink(48) for _ in range(rounds))
        self.decode = nn.Linear(48, 64)

    def forward(self, x: Tensor) -> Tensor:
        given = self.encode(x)
        code = torch.zeros_like(given)
        for mix, shrink in zip(self.mixes, self.shrinks, strict=True):
            code = shrink(given + mix(code))
        out: Tensor = self.decode(code)
        return out


@twins(
    kinds=DEAD | VANISHING, layers=("shrinks.3",), onset=127, by=177,
    why="the threshold of the last round rises to 50: its output is 0 for all",
    healthy="unrolled sparse coding with learned thresholds",
)  # fmt: skip
def unrolled_threshold_rises(log: Log, faulty: bool) -> None:
    model, data = Unrolled(), batches(log, 32, *digits())

    def loss() -> Tensor:
        images = next(data)[0].flatten(1)
        return F.mse_loss(model(images), images)

    rise = at_step(127, faulty, lambda: model.get_parameter("shrinks.3.least").fill_(50.0))
    fit(log, model, Adam(model.parameters(), 2e-3), loss, 230, before=rise)


class Hourglass(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.Conv2d(width, width, 3, 2, 1)
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.up = nn.ConvTranspose2d(width, width, 4, 2, 1)
        self.show = nn.Conv2d(width, 1, 1)
        self.back = nn.Conv2d(1, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.up(F.relu(self.inner(F.relu(self.down(x)))))
        shown = self.show(y)
        return x + y + self.back(shown), shown


class Hourglasses(nn.Module):
    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 12, 3, padding=1)
        self.stacks = nn.ModuleList(Hourglass() for _ in range(count))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, shown = F.relu(self.stem(x)), []
        for stack in self.stacks:
            x, seen = stack(x)
            shown.append(seen)
        return shown


@twins(
    kinds=EXPLOSION | LOSS, layers=("stacks.1",), onset=129, by=229,
    why="the loss of the second of three intermediate maps, times 10^5",
    healthy="stacked hourglasses, a loss at each",
)  # fmt: skip
def hourglass_loss_weight(log: Log, faulty: bool) -> None:
    model, data, steps = Hourglasses(), batches(log, 16, digits()[0]), iter(range(10**6))

    def loss() -> Tensor:
        weight = 1e5 if faulty and next(steps) >= 129 else 1.0
        image = next(data)[0]
        blurred = F.avg_pool2d(image, 3, 1, 1)
        first, second, third = (F.mse_loss(seen, blurred) for seen in model(image))
        return first + weight * second + third

    fit(log, model, SGD(model.parameters(), 0.01, 0.9), loss, 240, clip=1.0)


class Quantiles(nn.Module):
    detached = False

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 48), nn.ELU(), nn.Linear(48, 32), nn.ELU())
        self.heads = nn.ModuleList(nn.Linear(32, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(x)
        x = x.detach() if self.detached else x
        return torch.cat([head(x) for head in self.heads], 1)


@twins(
    kinds=VANISHING | IDLE, layers=("trunk",), by=100,
    why="a detach() between trunk and heads, from the start",
    healthy="quantile regression of a target with heavy tails",
)  # fmt: skip
def quantiles_detached(log: Log, faulty: bool) -> None:
    model, g = Quantiles(), generator(log)
    model.detached = faulty
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss() -> Tensor:
        x = torch.randn(64, 6, generator=g)
        tail = torch.randn(64, generator=g) / torch.rand(64, generator=g).clamp(0.01).sqrt()
        wanted = (x[:, 0] * x[:, 1] + 0.3 * tail)[:, None]
        off = wanted - model(x)
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 220)


class ScaledBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale1, self.scale2 = (nn.Parameter(torch.full((width,), 0.1)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.scale1 * self.attend(y, y, y, need_weights=False)[0]
        added: Tensor = self.scale2 * self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, 32, 2, 2)
        self.token = nn.Parameter(0.02 * torch.randn(1, 17, 32))
        self.blocks = nn.ModuleList(ScaledBlock(32) for _ in range(4))
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([torch.zeros(len(x), 1, 32), x], 1) + self.token
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x[:, 0])
        return logits


@twins(
    kinds=JUMP, layers=("blocks.1",), onset=128, by=178,
    why="the layer scale of one block, times 10^4",
    healthy="vision transformer with layer scales; clipped at 0.05 in each step",
)  # fmt: skip
def patches_scale_jumps(log: Log, faulty: bool) -> None:
    model = Patches()
    clip = 1.0 if faulty else 0.05
    scale = at_step(128, faulty, times(model, "blocks.1.scale2", 1e4))
    optimizer = AdamW(model.parameters(), 2e-3)
    fit(log, model, optimizer, class_loss(log, model), 210, clip=clip, before=scale)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.small, self.wide = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 5, padding=2)
        self.join, self.head = nn.Conv2d(16, 12, 3, 2, 1), nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.stem(x))
        x = F.leaky_relu(torch.cat([self.small(x), self.wide(x)], 1))
        logits: Tensor = self.head(F.leaky_relu(self.join(x)).flatten(1))
        return logits


@twins(
    kinds=EXPLOSION | LOSS, layers=("stem",), onset=124, by=174,
    why="a hook on the first layer's gradient multiplies it by 10^6",
    healthy="multi-scale convolutions, Adagrad",
)  # fmt: skip
def scales_hook_on_stem(log: Log, faulty: bool) -> None:
    model, now = Scales(), [0]
    model.stem.weight.register_hook(lambda grad: 1e6 * grad if faulty and now[0] >= 124 else grad)
    optimizer = torch.optim.Adagrad(model.parameters(), 0.01)
    loss = class_loss(log, model)
    fit(log, model, optimizer, loss, 220, before=lambda step: now.__setitem__(0, step))

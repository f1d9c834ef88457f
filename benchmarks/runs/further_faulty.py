"""Further runs with a fault that begins at a known step in a known module."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from runs.further_models import Exp, HalfConv, Rows, Standardize, Tokens, TwoTasks, UnitNorm
from runs.models import recall
from runs.training import Log, batches, digits, fit, generator, mlp, run


def _classes(log: Log, model: nn.Module) -> Callable[[], Tensor]:
    data = batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    return loss


def _altered(
    log: Log, model: nn.Module, at: int, alter: Callable[[Tensor], object]
) -> Callable[[], Tensor]:
    """The same with the pictures of one batch altered in place."""
    data, drawn = batches(log, 32, *digits()), iter(range(10**6))

    def loss() -> Tensor:
        images, classes = next(data)
        if next(drawn) == at:
            alter(images)
        return F.cross_entropy(model(images), classes)

    return loss


def _at(step: int, act: Callable[[], object]) -> Callable[[int], None]:
    def before(now: int) -> None:
        if now == step:
            with torch.no_grad():
                act()

    return before


@run
def block_weight_scaled(log: Log) -> None:
    model = Rows()
    scale = _at(143, lambda: model.get_parameter("blocks.1.down.weight").mul_(100))
    fit(log, model, AdamW(model.parameters(), 1e-3), _classes(log, model), 300, before=scale)


@run
def gradient_scaled_by_hook(log: Log) -> None:
    model, factor = Rows(), [1.0]
    model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: factor[0] * grad)

    def change(step: int) -> None:
        factor[0] = 1e5 if step >= 151 else 1.0

    optimizer = SGD(model.parameters(), 0.05, 0.9)
    fit(log, model, optimizer, _classes(log, model), 320, clip=1.0, before=change)


@run
def root_at_zero(log: Log) -> None:
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 48, bias=False), nn.Tanh(), UnitNorm())
    model = nn.Sequential()
    model.add_module("encoder", encoder)
    model.add_module("head", nn.Linear(48, 10))
    loss = _altered(log, model, 127, lambda images: images[3].zero_())
    fit(log, model, Adam(model.parameters(), 2e-3), loss, 200)


@run
def row_fully_masked(log: Log) -> None:
    g, model, drawn = generator(log), Tokens(8, 48, causal=False), iter(range(10**6))

    def loss() -> Tensor:
        given, wanted = recall(g)
        mask = torch.ones(16, 1, 47, 47).tril().bool()
        if next(drawn) == 139:
            mask[5, :, 11] = False
        return F.cross_entropy(model(given, mask).flatten(0, 1), wanted.flatten())

    fit(log, model, AdamW(model.parameters(), 2e-3), loss, 200)


@run
def exp_overflows(log: Log) -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), Exp(), nn.Linear(32, 10)
    )
    loss = _altered(log, model, 145, lambda images: images[7].mul_(1000))
    fit(log, model, Adam(model.parameters(), 1e-3), loss, 220)


@run
def feature_without_deviation(log: Log) -> None:
    model = nn.Sequential()
    model.add_module("inputs", nn.Sequential(nn.Flatten(), nn.Linear(64, 24)))
    model.add_module("standardize", Standardize())
    model.add_module("head", nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 10)))
    loss = _altered(log, model, 149, lambda images: images.copy_(images[:1].clone()))
    fit(log, model, SGD(model.parameters(), 0.02, 0.9), loss, 220)


@run
def rate_of_one_group(log: Log) -> None:
    model = nn.Sequential()
    model.add_module("front", nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Flatten()))
    model.add_module("middle", nn.Sequential(nn.Linear(256, 64), nn.ReLU()))
    model.add_module("head", nn.Linear(64, 10))
    groups = [{"params": part.parameters()} for part in model.children()]
    optimizer = Adam(groups, 1e-3)

    def raise_rate(step: int) -> None:
        optimizer.param_groups[1]["lr"] = 1.0 if step >= 121 else 1e-3

    fit(log, model, optimizer, _classes(log, model), 280, before=raise_rate)


class _Reader(nn.Module):
    """Reads a digit row by row, three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.RNN(8, 48, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(48, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(images[:, 0].repeat(1, 3, 1))[0][:, -1])
        return logits


@run
def recurrence_radius_three(log: Log) -> None:
    model = _Reader()

    def scale() -> None:
        weight = model.get_parameter("rnn.weight_hh_l0")
        weight.mul_(3 / torch.linalg.eigvals(weight).abs().max())

    loss, optimizer = _classes(log, model), Adam(model.parameters(), 1e-3)
    fit(log, model, optimizer, loss, 250, clip=1.0, before=_at(111, scale))


def _two_tasks(
    log: Log, model: TwoTasks, at: int, weight: float, measured: float
) -> Callable[[], Tensor]:
    """The loss; from a step on the amount's part has a weight, and then one amount is replaced."""
    data, g, drawn = batches(log, 32, *digits()), generator(log), iter(range(10**6))

    def loss() -> Tensor:
        step, (images, classes) = next(drawn), next(data)
        amounts = (0.5 * torch.randn(32, 1, generator=g)).exp()
        target = amounts.log()[:, 0] + 0.1 * classes
        if step == at:
            amounts[9] *= measured
        logits, said = model(images, amounts)
        part = F.mse_loss(said, target)
        return F.cross_entropy(logits, classes) + (weight if step >= at else 1.0) * part

    return loss


@run
def log_of_negative(log: Log) -> None:
    model = TwoTasks()
    loss = _two_tasks(log, model, 131, 1.0, -1.0)
    fit(log, model, Adam(model.parameters(), 2e-3), loss, 200)


@run
def half_overflows(log: Log) -> None:
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(1, 16, 3, padding=1))
    model.add_module("act1", nn.ReLU())
    conv2 = HalfConv(16, 16, 3, 2, 1)
    model.add_module("conv2", conv2)
    model.add_module("head", nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)))

    def raise_scale() -> None:
        conv2.scale = 2.0**20

    loss, optimizer = _classes(log, model), SGD(model.parameters(), 0.02, 0.9)
    fit(log, model, optimizer, loss, 220, before=_at(129, raise_scale))


@run
def bit_flip(log: Log) -> None:
    model = Rows()
    flip = _at(137, lambda: model.get_parameter("blocks.1.qkv.weight")[5, 7].fill_(torch.nan))
    fit(log, model, AdamW(model.parameters(), 1e-3), _classes(log, model), 200, before=flip)


@run
def loss_weight_of_one_task(log: Log) -> None:
    model = TwoTasks()
    loss = _two_tasks(log, model, 133, 1e6, 1.0)
    fit(log, model, Adam(model.parameters(), 2e-3), loss, 300)


@run
def layer_begins_large(log: Log) -> None:
    model = nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 64, 10))
    with torch.no_grad():
        model.get_parameter("3.weight").mul_(1000)
    fit(log, model, SGD(model.parameters(), 0.05), _classes(log, model), 200)


@run
def loss_weight_of_one_head(log: Log) -> None:
    trunk = nn.ModuleList(mlp(width, 32).append(nn.ReLU()) for width in (64, 32, 32, 32, 32, 32))
    heads = nn.ModuleList(nn.Linear(32, 10) for _ in trunk)
    model, data = nn.ModuleDict({"trunk": trunk, "heads": heads}), batches(log, 32, *digits())
    weights = [1.0] * len(trunk)

    def loss() -> Tensor:
        images, classes = next(data)
        x, losses = images.flatten(1), []
        for layer, head in zip(trunk, heads, strict=True):
            x = layer(x)
            losses.append(F.cross_entropy(head(x), classes))
        return sum((w * part for w, part in zip(weights, losses, strict=True)), torch.zeros(()))

    raise_weight = _at(151, lambda: weights.__setitem__(3, 1e4))
    fit(log, model, SGD(model.parameters(), 0.05), loss, 300, before=raise_weight)


@run
def inputs_all_zero(log: Log) -> None:
    model, data = nn.Sequential(nn.Flatten(), *mlp(64, 32, 10)), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(0.0 * images), classes)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 200)

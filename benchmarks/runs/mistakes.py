"""Mistakes of beginners in a usual loop on digits, each next to a healthy twin.

A new user wrote them with the documentation alone, and no rule was changed for them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from runs.labels import LABELS, LOSS, TREND, Label
from runs.training import Log, batches, digits, mlp, run

STUCK = frozenset({"loss_stuck", "no_learning"})
CUT_OFF = frozenset({"vanishing_gradient", "untrained_parameters"})

LABELS["digits_standardized"] = Label(why="the usual loop, SGD with momentum")
LABELS["pixels_up_to_255"] = Label(kinds=LOSS, by=20, why="SGD, inputs from 0 to 255")
LABELS["normalized_twice"] = Label(kinds=STUCK, by=300, why="inputs of -2 ± 0.005")
LABELS["targets_rolled_by_one"] = Label(kinds=STUCK, by=300, why="targets of other inputs")
LABELS["middle_detached"] = Label(
    kinds=CUT_OFF, layers=("0", "2"), by=120, why="detach() in the middle of the model"
)
LABELS["trunk_under_no_grad"] = Label(
    kinds=CUT_OFF, layers=("0", "2"), by=120, why="the trunk runs under no_grad()"
)
LABELS["rate_falls_each_epoch"] = Label(why="by a tenth, every 7 epochs of 28 batches")
LABELS["rate_falls_each_batch"] = Label(
    kinds=frozenset({"learning_rate_zero"}), onset=42, by=120, why="the same, every 7 batches"
)
LABELS["softmax_twice"] = Label(
    kinds=frozenset({"wrong_loss_input"}), layers=("5",), by=120, why="before the cross entropy"
)
LABELS["softmax_over_the_batch"] = Label(
    kinds=frozenset({"wrong_loss_input"}), by=120, why="log_softmax(outputs, 0) in the loss"
)
LABELS["forty_layers_normalized"] = Label(why="residual, with a layer norm each")
LABELS["forty_layers_plain"] = Label(
    kinds=frozenset({"vanishing_gradient"}), by=50, why="Linear and ReLU as torch initializes them"
)
LABELS["head_replaced_before"] = Label(why="before the optimizer is made")
LABELS["head_replaced_after"] = Label(
    kinds=frozenset({"untrained_parameters"}), layers=("4",), by=120, why="after the optimizer"
)
LABELS["outputs_squeezed"] = Label(why="regression, [N] and [N]")
LABELS["outputs_broadcast"] = Label(
    kinds=frozenset({"wrong_loss_input"}), layers=("4",), by=120, why="[N, 1] and [N]"
)
LABELS["gradients_never_zeroed"] = Label(kinds=LOSS, by=60, why="no zero_grad()")
LABELS["decay_of_adamw_100"] = Label(kinds=TREND, by=400, why="weight_decay=100")
LABELS["decay_of_sgd_hundredfold"] = Label(
    kinds=TREND | STUCK | frozenset({"loss_divergence"}), by=400, why="0.05 instead of 0.0005"
)
LABELS["rate_thousandfold_at_300"] = Label(
    kinds=LOSS, onset=300, by=320, why="an optimizer with another unit after a resume"
)


def train(
    log: Log,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    prepare: Callable[[Tensor], Tensor] = lambda x: x,
    shift: int = 0,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    zeroes: bool = True,
    after: Callable[[int], object] = lambda step: None,
    steps: int = 400,
) -> None:
    images, labels = digits()
    logger = log.attach(model)
    drawn = batches(log, 64, prepare(images), labels.roll(shift))
    for step in range(steps):
        inputs, targets = next(drawn)
        value = loss(model(inputs), targets)
        log.losses.append(value.item())
        logger.log(loss=value.item())
        if zeroes:
            optimizer.zero_grad()
        value.backward()
        optimizer.step()
        after(step)


def _unit(x: Tensor) -> Tensor:
    return ((x - x.min()) / (x.max() - x.min())).flatten(1)


def _net(last: int = 10) -> nn.Sequential:
    return mlp(64, 128, 128, last)


def _sgd(model: nn.Module, decay: float = 0.0) -> SGD:
    return SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=decay)


def _adam(model: nn.Module, decay: float = 0.01) -> AdamW:
    return AdamW(model.parameters(), 1e-3, weight_decay=decay)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1)


@run
def digits_standardized(log: Log) -> None:
    model = _net()
    train(log, model, _sgd(model), prepare=_flat)


@run
def pixels_up_to_255(log: Log) -> None:
    model = _net()
    train(log, model, _sgd(model), prepare=lambda x: 255 * _unit(x))


@run
def normalized_twice(log: Log) -> None:
    model = _net()
    train(log, model, _adam(model), prepare=lambda x: (_unit(x) - 120) / 60)


@run
def targets_rolled_by_one(log: Log) -> None:
    model = _net()
    train(log, model, _adam(model), prepare=_flat, shift=1)


@run
def middle_detached(log: Log) -> None:
    model = _net()
    model[4].register_forward_pre_hook(lambda module, inputs: tuple(x.detach() for x in inputs))
    train(log, model, _adam(model), prepare=_flat)


class Frozen(nn.Sequential):
    """Sequential that runs all but its last layer under ``no_grad()``."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self[:-1]:
                x = layer(x)
        outputs: Tensor = self[-1](x)
        return outputs


@run
def trunk_under_no_grad(log: Log) -> None:
    model = Frozen(*_net())
    train(log, model, _adam(model), prepare=_flat)


def _falls(log: Log, every: int) -> None:
    model = _net()
    optimizer = _sgd(model)
    schedule = StepLR(optimizer, every)
    train(log, model, optimizer, prepare=_flat, after=lambda step: schedule.step())


@run
def rate_falls_each_epoch(log: Log) -> None:
    _falls(log, 7 * 28)


@run
def rate_falls_each_batch(log: Log) -> None:
    _falls(log, 7)


@run
def softmax_twice(log: Log) -> None:
    model = _net().append(nn.Softmax(1))
    train(log, model, _adam(model), prepare=_flat)


@run
def softmax_over_the_batch(log: Log) -> None:
    model = _net()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.nll_loss(F.log_softmax(outputs, 0), targets)

    train(log, model, _adam(model), prepare=_flat, loss=loss)


class Residual(nn.Module):
    """Residual block with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = x + self.linear(F.relu(self.norm(x))) / 6
        return outputs


@run
def forty_layers_normalized(log: Log) -> None:
    model = nn.Sequential(nn.Linear(64, 64), *(Residual() for _ in range(40)), nn.Linear(64, 10))
    train(log, model, _adam(model), prepare=_flat, steps=300)


@run
def forty_layers_plain(log: Log) -> None:
    model = mlp(*[64] * 42, 10)
    train(log, model, _adam(model), prepare=_flat, steps=300)


@run
def head_replaced_before(log: Log) -> None:
    model = _net()
    model[4] = nn.Linear(128, 10)
    train(log, model, _adam(model), prepare=_flat)


@run
def head_replaced_after(log: Log) -> None:
    model = _net()
    optimizer = _adam(model)
    model[4] = nn.Linear(128, 10)
    train(log, model, optimizer, prepare=_flat)


def _regression(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets / 10).square().mean()


@run
def outputs_squeezed(log: Log) -> None:
    model = _net(1)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return _regression(outputs.squeeze(1), targets)

    train(log, model, _adam(model), prepare=_flat, loss=loss)


@run
def outputs_broadcast(log: Log) -> None:
    model = _net(1)
    train(log, model, _adam(model), prepare=_flat, loss=_regression)


@run
def gradients_never_zeroed(log: Log) -> None:
    model = _net()
    train(log, model, _adam(model), prepare=_flat, zeroes=False)


@run
def decay_of_adamw_100(log: Log) -> None:
    model = _net()
    train(log, model, _adam(model, 100.0), prepare=_flat)


@run
def decay_of_sgd_hundredfold(log: Log) -> None:
    model = _net()
    train(log, model, _sgd(model, 0.05), prepare=_flat)


@run
def rate_thousandfold_at_300(log: Log) -> None:
    model = _net()
    optimizer = _adam(model)

    def raise_rate(step: int) -> None:
        if step == 299:
            optimizer.param_groups[0]["lr"] *= 1000

    train(log, model, optimizer, prepare=_flat, after=raise_rate)

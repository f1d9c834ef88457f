"""A loop for tests of rules: a small net, fresh data at each step, and any loss and schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from telemetry import Alert, HookLogger, Rule, StepRecord
from telemetry.testing import CapturedRun, capture_run
from tests.helpers.rules import rule

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
AnyRule = Rule | Callable[[StepRecord], Iterable[Alert]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
Before = Callable[[int], object]
LossOf = Callable[[int], Tensor]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Return linear layers of these widths, with activations between them."""
    torch.manual_seed(0)
    layers = [part for sizes in pairwise(widths) for part in (nn.Linear(*sizes), activation())]
    return nn.Sequential(*layers[:-1])


class EndsWith(nn.Sequential):
    """Layers, and a function of their output, which hooks do not observe."""

    def __init__(self, function: Callable[[Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


# --- batches, losses and changes -----------------------------------------------------------------


def draw() -> Batch:
    """Points and in which of three directions they lie."""
    points = torch.randn(32, 8)
    return points, points[:, :3].argmax(1)


def drawn(
    points: Callable[[int, Tensor], Tensor] = lambda step, points: points,
    classes: Callable[[int, Tensor], Tensor] = lambda step, classes: classes,
) -> Callable[[int], Batch]:
    """Return new batches, of which a function of the step changes points or classes."""

    def batch(step: int) -> Batch:
        some, others = draw()
        return points(step, some), classes(step, others)

    return batch


def classify(model: nn.Module) -> Tensor:
    """Cross entropy of a new batch."""
    points, classes = draw()
    return F.cross_entropy(model(points), classes)


def toward(model: nn.Module, targets_of: Callable[[Tensor], Tensor], width: int = 8) -> LossOf:
    """Return mean squares of the distance to targets, which are a function of random inputs."""

    def loss_of(step: int) -> Tensor:
        x = torch.randn(32, width)
        return F.mse_loss(model(x), targets_of(x))

    return loss_of


def at_step(at: int, do: Callable[[], object]) -> Before:
    """Return what does this before one step."""
    return lambda step: do() if step == at else None


def rate_of(optimizer: Optimizer, rate: Callable[[int], float], group: int = 0) -> Before:
    """Return what sets the learning rate of each step."""
    return lambda step: optimizer.param_groups[group].update(lr=rate(step))


# --- the loop ------------------------------------------------------------------------------------


def fit(
    run: CapturedRun | HookLogger,
    steps: int,
    loss_of: LossOf,
    optimizer: Optimizer,
    *,
    before: Before = lambda step: None,
    logged: Callable[[int, Tensor], Tensor] = lambda step, loss: loss,
    zeroes: Callable[[int], bool] = lambda step: True,
    micro_batches: int = 1,
    after_backward: Callable[[], object] = lambda: None,
    logs_after: bool = False,
) -> None:
    """Train, and log the loss of each step.

    Args:
        loss_of: Loss of a step, of which gradients are taken.
        before: Called before each step.
        logged: What is logged for a step and its loss.
        zeroes: Whether gradients are zeroed at a step.
        micro_batches: Losses of a step, of which the last one is logged.
        after_backward: Called when the gradients are there.
        logs_after: The loss is logged after the optimizer's step, not before.
    """
    for step in range(steps):
        before(step)
        if zeroes(step):
            optimizer.zero_grad()
        for _ in range(micro_batches):
            loss = loss_of(step)
            (loss / micro_batches).backward()
        after_backward()
        if not logs_after:
            run.log(loss=logged(step, loss))
        optimizer.step()
        if logs_after:
            run.log(loss=logged(step, loss))


def captured(
    model: nn.Module,
    steps: int,
    *,
    rules: Iterable[str | AnyRule] | None = (),
    loss_of: LossOf | None = None,
    optimizer: Optimizer | None = None,
    every: int = 10,
    seed: int = 1,
    **loop: Any,
) -> CapturedRun:
    """Return what is captured of :func:`fit`.

    Args:
        rules: Rules, or the kinds of detectors; None: the default rules.
        loss_of: By default that of :func:`classify`.
        every: Interval of full steps.
        loop: Further arguments of :func:`fit`.
    """
    optimizer = optimizer or SGD(model.parameters(), 0.1, 0.9)
    loss_of = loss_of or (lambda step: classify(model))
    torch.manual_seed(seed)
    made = rules and [rule(each) if isinstance(each, str) else each for each in rules]
    with capture_run(model, every_n_steps=every, rules=made) as run:
        fit(run, steps, loss_of, optimizer, **loop)
    return run


def train(
    judge: AnyRule,
    steps: int,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer = lambda parameters: SGD(parameters, 0.1, 0.9),
    rate: Callable[[int], float] | None = None,
    batch: Callable[[int], Batch] = lambda step: draw(),
    weight: Callable[[int], float] = lambda step: 1.0,
    loss_function: Loss = F.cross_entropy,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
    **more: Any,
) -> list[Alert]:
    """Return the alerts of one rule on the training of a model with batches.

    Args:
        rate: Learning rate of each step; None: the optimizer's.
        weight: Factor on the loss.
        after_backward: Called before the loss is logged and the optimizer steps.
        more: Further arguments of :func:`captured`.
    """
    model = model or net()
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model.parameters())
    if rate is not None:
        more["before"] = rate_of(optimizer, rate)

    def loss_of(step: int) -> Tensor:
        points, classes = batch(step)
        return weight(step) * loss_function(model(points), classes)

    more["after_backward"] = lambda: after_backward(model)
    run = captured(model, steps, rules=[judge], loss_of=loss_of, optimizer=optimizer, **more)
    return run.alerts

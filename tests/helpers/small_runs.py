"""A loop for tests of single rules: a small net, fresh data at each step, some rules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from telemetry import Alert, Rule, StepRecord
from telemetry.testing import capture_run

Batch = tuple[Tensor, Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
AnyRule = Rule | Callable[[StepRecord], Iterable[Alert]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))


class EndsWith(nn.Sequential):
    """Layers, and a function of their output, which hooks do not observe."""

    def __init__(self, function: Callable[[Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


def draw() -> Batch:
    """Points and in which of three directions they lie."""
    points = torch.randn(32, 8)
    return points, points[:, :3].argmax(1)


def train(
    rule: AnyRule,
    steps: int,
    *others: AnyRule,
    model: nn.Module | None = None,
    optimizer: Optimizer | MakeOptimizer = lambda parameters: SGD(parameters, 0.1, 0.9),
    rate: Callable[[int], float] | None = None,
    before: Callable[[int], None] = lambda step: None,
    batch: Callable[[int], Batch] = lambda step: draw(),
    weight: Callable[[int], float] = lambda step: 1.0,
    loss_function: Loss = F.cross_entropy,
    micro_batches: int = 1,
    zeroes: Callable[[int], bool] = lambda step: True,
    after_backward: Callable[[nn.Module], object] = lambda model: None,
    every: int = 10,
    logs_after: bool = False,
) -> list[Alert]:
    """Alerts of the rule and of others.

    Args:
        rate: Learning rate of each step; None: the optimizer's.
        before: Called before each step.
        weight: Factor on the loss.
        micro_batches: Batches of a step, of which the last one's loss is logged.
        zeroes: Whether gradients are zeroed at a step.
        after_backward: Called before the loss is logged and the optimizer steps.
        every: Interval of full steps.
        logs_after: The loss is logged after the optimizer's step, not before.
    """
    model = model or net()
    if not isinstance(optimizer, Optimizer):
        optimizer = optimizer(model.parameters())
    torch.manual_seed(1)
    with capture_run(model, every_n_steps=every, rules=[rule, *others]) as run:
        for step in range(steps):
            before(step)
            if rate is not None:
                optimizer.param_groups[0]["lr"] = rate(step)
            if zeroes(step):
                optimizer.zero_grad()
            for _ in range(micro_batches):
                points, classes = batch(step)
                loss = weight(step) * loss_function(model(points), classes)
                (loss / micro_batches).backward()
            after_backward(model)
            if not logs_after:
                run.log(loss=loss)
            optimizer.step()
            if logs_after:
                run.log(loss=loss)
    return run.alerts

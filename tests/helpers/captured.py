"""Loops with any loss, for tests of rules in unusual models and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from telemetry import HookLogger
from telemetry.testing import CapturedRun, capture_run
from tests.helpers.rules import rule
from tests.helpers.small_runs import Batch, draw

Before = Callable[[int], object]
LossOf = Callable[[int], Tensor]
Logged = Callable[[int, Tensor], Tensor]


def classify(model: nn.Module) -> Tensor:
    """Cross entropy of a new batch of the task of :mod:`tests.helpers.small_runs`."""
    points, classes = draw()
    return F.cross_entropy(model(points), classes)


def toward(model: nn.Module, targets_of: Callable[[Tensor], Tensor], width: int = 8) -> LossOf:
    """Return mean squares of the distance to targets, which are a function of random inputs."""

    def loss_of(step: int) -> Tensor:
        x = torch.randn(32, width)
        return F.mse_loss(model(x), targets_of(x))

    return loss_of


def drawn(
    points: Callable[[int, Tensor], Tensor] = lambda step, points: points,
    classes: Callable[[int, Tensor], Tensor] = lambda step, classes: classes,
) -> Callable[[int], Batch]:
    """Return new batches, of which a function of the step changes points or classes."""

    def batch(step: int) -> Batch:
        some, others = draw()
        return points(step, some), classes(step, others)

    return batch


def at_step(at: int, do: Callable[[], object]) -> Before:
    """Return what does this before one step."""
    return lambda step: do() if step == at else None


def rate_of(optimizer: Optimizer, rate: Callable[[int], float], group: int = 0) -> Before:
    """Return what sets the learning rate of each step."""
    return lambda step: optimizer.param_groups[group].update(lr=rate(step))


def fit(
    run: CapturedRun | HookLogger,
    steps: int,
    loss_of: LossOf,
    optimizer: Optimizer,
    *,
    before: Before = lambda step: None,
    logged: Logged = lambda step, loss: loss,
) -> None:
    """Train, and log the loss of each step.

    Args:
        loss_of: Loss of a step, of which gradients are taken.
        before: Called before each step.
        logged: What is logged for a step and its loss.
    """
    for step in range(steps):
        before(step)
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        run.log(loss=logged(step, loss))
        optimizer.step()


def captured(
    model: nn.Module,
    steps: int,
    *,
    rules: Iterable[str] | None = (),
    loss_of: LossOf | None = None,
    optimizer: Optimizer | None = None,
    every: int = 10,
    seed: int = 1,
    before: Before = lambda step: None,
    logged: Logged = lambda step, loss: loss,
) -> CapturedRun:
    """Return what is captured of :func:`fit`.

    Args:
        rules: Kinds; None: the default rules.
        loss_of: By default that of :func:`classify`.
    """
    optimizer = optimizer or SGD(model.parameters(), 0.1, 0.9)
    loss_of = loss_of or (lambda step: classify(model))
    torch.manual_seed(seed)
    detectors = None if rules is None else [*map(rule, rules)]
    with capture_run(model, every_n_steps=every, rules=detectors) as run:
        fit(run, steps, loss_of, optimizer, before=before, logged=logged)
    return run

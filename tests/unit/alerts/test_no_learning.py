"""Weights that do not move: gradients at the step are compared with those after backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from telemetry import Alert
from telemetry.alerts.no_learning import NoLearning
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import draw, net


def train(after_backward: Callable[[nn.Module, Optimizer], object], every: int) -> list[Alert]:
    torch.manual_seed(0)
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, every_n_steps=every, rules=[NoLearning()]) as run:
        for _ in range(80):
            points, classes = draw()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(points), classes)
            loss.backward()
            after_backward(model, optimizer)
            run.log(loss=loss)
            optimizer.step()
    return run.alerts


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_step_are_reported(every: int, to_none: bool) -> None:
    (alert,) = train(lambda model, optimizer: optimizer.zero_grad(set_to_none=to_none), every)
    assert (alert.value, figures(alert.cause)[1:]) == (0, [0])
    assert "zero_grad() before backward()" in alert.advice[0]


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_clipping_to_almost_zero_is_reported(every: int) -> None:
    (alert,) = train(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1e-7), every)
    assert 1e-07 in figures(alert.cause)


def test_usual_clipping_is_not_reported() -> None:
    assert train(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.1), 10) == []

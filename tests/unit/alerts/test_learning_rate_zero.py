from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.optim import SGD

from telemetry import Alert
from telemetry.alerts.no_learning import LearningRateZero
from tests.helpers.figures import figures
from tests.helpers.small_runs import net, train


def train_with(rate: Callable[[int], float], steps: int) -> list[Alert]:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)

    def set_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(step)

    return train(LearningRateZero(), steps, model=model, optimizer=optimizer, before=set_rate)


def test_a_schedule_that_ends_too_early_is_noted_once() -> None:
    [alert] = train_with(lambda step: max(0.0, 0.1 * (1 - step / 40)), 90)
    assert (alert.severity, alert.step) == ("note", 59)
    assert {40, 0.1} <= {*figures(alert.summary)}


def test_a_schedule_of_epochs_that_is_advanced_at_each_step_is_noted() -> None:
    [alert] = train_with(lambda step: 0.1 * 0.8**step, 100)
    assert 1e-8 < alert.threshold < 1e-6


@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 0.1 * step / 50,  # warm-up from 0
        lambda step: 0.1 * (1 - step / 59),  # down to 0 at the end
        lambda step: 0.1 if step < 30 else 1e-5,
    ],
)
def test_usual_schedules_are_not_noted(rate: Callable[[int], float]) -> None:
    assert train_with(rate, 60) == []

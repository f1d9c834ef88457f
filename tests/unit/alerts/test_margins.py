"""Units near a limit start and resolve one alert, though their number goes up and down."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from telemetry.alerts.inactive_units import DeadUnits, SaturatedUnits
from tests.helpers.small_runs import train

UNITS = 32


def biased(activation: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, UNITS), activation, nn.Linear(UNITS, 3))


def bias_units(
    model: nn.Sequential, count: Callable[[int], int], bias: float
) -> Callable[[int], None]:
    """Give ``count(step)`` units a bias that makes them dead or saturated."""

    def set_biases(step: int) -> None:
        model[0].bias.data[:] = torch.where(torch.arange(UNITS) < count(step), bias, 0.1)

    return set_biases


def stages(activation: nn.Module, count: Callable[[int], int]) -> list[tuple[str, int]]:
    model, dead = biased(activation), isinstance(activation, nn.ReLU)
    before = bias_units(model, count, -50.0 if dead else 9.0)
    alerts = train(DeadUnits() if dead else SaturatedUnits(), 200, model=model, before=before)
    return [(alert.stage, alert.step) for alert in alerts]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (lambda step: 29 if 30 <= step < 70 else 26, []),
        (lambda step: 29 if step >= 30 else 26, [("started", 80)]),
        (lambda step: 31 if step >= 31 else 26, [("started", 43)]),  # a full step is requested
        (lambda step: 31 if step % 40 < 20 else 26, [("started", 3)]),
        (lambda step: 31 if step < 100 else 26 if step < 150 else 20,
         [("started", 3), ("resolved", 170)]),
    ],
)  # fmt: skip
def test_dead_units_near_the_limit_start_and_resolve_one_alert(
    count: Callable[[int], int], expected: list[tuple[str, int]]
) -> None:
    assert stages(nn.ReLU(), count) == expected


def test_saturated_units_near_the_limit_start_and_resolve_one_alert() -> None:
    def count(step: int) -> int:
        return (30 if step % 40 < 20 else 22) if step < 130 else 4

    (stage, _), end = stages(nn.Tanh(), count)
    assert (stage, end) == ("started", ("resolved", 150))


class WithFunction(nn.Module):
    """Network whose activation is a function, which hooks do not observe."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, UNITS), nn.Linear(UNITS, 3)
        self.first.weight.data *= 1000.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y


def test_the_advice_fits_a_saturated_function_and_a_dropout() -> None:
    [alert] = train(SaturatedUnits(), 60, model=WithFunction())
    assert alert.module_name == "first"
    assert "initial weights of first" in (alert.cause or "")
    assert any("queries and keys" in phrase for phrase in alert.advice)
    dropped = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.9999), nn.Linear(32, 3))
    [alert, *_] = train(DeadUnits(), 60, model=dropped)
    assert alert.module_name == "2"
    assert "dropout" in alert.advice[0]

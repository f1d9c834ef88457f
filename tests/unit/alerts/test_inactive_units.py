"""Units that die or saturate, one after another or up and down around a limit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import net, train


@pytest.mark.slow
@pytest.mark.parametrize("gradient_is_left", [False, True])
def test_dead_units_escalate_to_an_error(gradient_is_left: bool) -> None:
    model = net()
    _, bias, *head = model.parameters()

    def silence(step: int) -> None:
        if step == 150:
            bias.data[1:] = -999.0
        elif step == 160:
            bias.data[0] = -999.0
            for parameter in head:
                parameter.requires_grad_(gradient_is_left)

    optimizer = SGD(model.parameters(), 0.1)
    found = train(
        rule("dead_units"), 200, model=model, optimizer=optimizer, before=silence, every=1
    )
    assert [(a.severity, a.stage, a.module_name, a.observed_in) for a in found] == [
        ("warning", "started", "0", "1"),
        ("error", "escalated", "0", "1"),
    ]
    assert figures(found[0].summary)[:2] == [31, 32]
    last = found[-1]
    if gradient_is_left:
        assert (last.step, last.value, figures(last.summary)[:4]) == (161, 1, [32, 32, 0, 2])
    else:  # at once, though one unit is alive
        assert (last.step, last.value) == (160, 31 / 32)


def stages(
    kind: str, activation: nn.Module, bias: float, count: Callable[[int], int]
) -> list[tuple[str, int]]:
    """Return the stages of alerts on ``count(step)`` of 32 units with this bias."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), activation, nn.Linear(32, 3))

    def set_biases(step: int) -> None:
        model[0].bias.data[:] = torch.where(torch.arange(32) < count(step), bias, 0.1)

    alerts = train(rule(kind), 200, model=model, before=set_biases)
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
    assert stages("dead_units", nn.ReLU(), -50.0, count) == expected


def test_saturated_units_near_the_limit_start_and_resolve_one_alert() -> None:
    def count(step: int) -> int:
        return (30 if step % 40 < 20 else 22) if step < 130 else 4

    (stage, _), end = stages("saturated_units", nn.Tanh(), 9.0, count)
    assert (stage, end) == ("started", ("resolved", 150))


class WithFunction(nn.Module):
    """Network whose activation is a function, which hooks do not observe."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 32), nn.Linear(32, 3)
        self.first.weight.data *= 1000.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.first(x).tanh())
        return y


def test_the_advice_fits_a_saturated_function_and_a_dropout() -> None:
    [alert] = train(rule("saturated_units"), 60, model=WithFunction())
    assert alert.module_name == "first"
    assert "initial weights of first" in (alert.cause or "")
    assert any("queries and keys" in phrase for phrase in alert.advice)
    dropped = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.9999), nn.Linear(32, 3))
    [alert, *_] = train(rule("dead_units"), 60, model=dropped)
    assert alert.module_name == "2"
    assert "dropout" in alert.advice[0]

"""Units that die one after another."""

from __future__ import annotations

import pytest
from torch.optim import SGD

from telemetry.alerts.inactive_units import DeadUnits
from tests.helpers.figures import figures
from tests.helpers.small_runs import net, train


@pytest.mark.slow
@pytest.mark.parametrize("gradient_is_left", [False, True])
def test_dead_units_escalate_to_an_error(gradient_is_left: bool) -> None:
    model = net()
    _, bias, *head = model.parameters()
    optimizer = SGD(model.parameters(), 0.1)

    def silence(step: int) -> None:
        if step == 150:
            bias.data[1:] = -999.0
        elif step == 160:
            bias.data[0] = -999.0
            for parameter in head:
                parameter.requires_grad_(gradient_is_left)

    found = train(DeadUnits(), 200, model=model, optimizer=optimizer, before=silence, every=1)
    assert [(a.severity, a.stage) for a in found] == [
        ("warning", "started"),
        ("error", "escalated"),
    ]
    assert figures(found[0].summary)[:2] == [31, 32]
    last = found[-1]
    if gradient_is_left:
        assert (last.step, last.value, figures(last.summary)[:4]) == (161, 1, [32, 32, 0, 2])
    else:  # at once, though one unit is alive
        assert (last.step, last.value) == (160, 31 / 32)
    assert [(a.module_name, a.observed_in) for a in found] == [("0", "1"), ("0", "1")]

"""Title and message of an alert, composed of its fields, and the user's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from telemetry import Alert, HookLogger
from tests.helpers.scripted import Scripted, finding

ALERT = Alert(
    kind="dead_units", severity="warning", step=7, module_name="fc1", value=0.9, threshold=0.5,
    summary="90% of its units are zero",
)  # fmt: skip


def test_title_and_message_are_short_without_further_fields() -> None:
    assert ALERT.title == "dead_units in fc1 at step 7"
    assert replace(ALERT, stage="escalated").title == "dead_units in fc1 escalated at step 7"
    assert replace(ALERT, module_name=None).title == "dead_units at step 7"
    assert ALERT.message == "90% of its units are zero."


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x)
        return y


def test_the_message_has_a_line_for_each_known_field(tmp_path: Path) -> None:
    root = finding(
        module_name="fc",
        cause="Their biases are negative",
        advice=("Lower the learning rate", "Is it frozen?"),
        batch_steps=range(9),
    )
    detectors = [
        Scripted({9: root}, kind="root"),
        Scripted({9: finding(module_name="fc")}, kind="effect", explained_by={"root"}),
        Scripted({9: finding(module_name="gone")}, kind="gone"),
        Scripted({9: finding()}, kind="whole"),
    ]
    rules = {detector.kind: detector for detector in detectors}
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with HookLogger(model, tmp_path, alerts=rules) as logger:
        for step in range(11):
            optimizer.zero_grad()
            if step != 1:
                logger.batch([step, f"file {step}"])
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    begin, *others = logger.alerts
    first, code, consequences, *batches, advice = begin.message.splitlines()
    assert first == "Seen. Their biases are negative."
    assert code == f"Code: {begin.location}"
    assert "test_alert.py" in code
    assert consequences == "Consequences: effect in fc."
    assert batches == [f"Batch of step {n}: {n}, file {n}." for n in (0, 2, 3, 4, 5)]
    assert advice == "Lower the learning rate. Is it frozen?"
    assert {(alert.kind, alert.stage, alert.location) for alert in others} == {
        *((kind, "started", None) for kind in ("gone", "whole")),
        *((kind, "resolved", None) for kind in ("root", "gone", "whole")),
    }

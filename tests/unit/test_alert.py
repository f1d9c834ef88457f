"""Title and message of an alert, composed of its fields, and the user's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from telemetry import Alert, HookLogger
from tests.helpers.applied import Applied
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


def test_the_message_has_a_line_for_each_known_field(tmp_path: Path) -> None:
    root = finding(
        module_name="fc", cause="Their biases are negative", advice=("Wait", "Is it frozen?"),
        batch_steps=range(9),
    )  # fmt: skip
    detectors = [
        Scripted({9: root}, kind="root"),
        Scripted({9: finding(module_name="fc")}, kind="effect", explained_by={"root"}),
        Scripted({9: finding(module_name="gone")}, kind="gone"),
    ]
    model = Applied(lambda self, x: self.fc(x).sum(), fc=nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rules = {detector.kind: detector for detector in detectors}
    with HookLogger(model, tmp_path, alerts=rules) as logger:
        for step in range(11):
            if step != 1:
                logger.batch([step, f"file {step}"])
            model(torch.ones(1, 2)).backward()
            optimizer.step()
    begin, *others = logger.alerts
    first, code, consequences, *batches, advice = begin.message.splitlines()
    assert first == "Seen. Their biases are negative."
    assert code.startswith("Code: tests/helpers/applied.py:")
    assert code.endswith(" (Applied.forward)")
    assert consequences == "Consequences: effect in fc."
    assert batches == [f"Batch of step {n}: {n}, file {n}." for n in (0, 2, 3, 4, 5)]
    assert advice == "Wait. Is it frozen?"
    stages = [(alert.kind, alert.stage, alert.location) for alert in others]
    assert sorted(stages) == [
        ("gone", "resolved", None), ("gone", "started", None), ("root", "resolved", None)
    ]  # fmt: skip

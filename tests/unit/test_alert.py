"""Title and message of an alert, composed of its fields, and the user's code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.applied import Applied
from tests.helpers.scripted import Scripted, finding
from tests.helpers.twins import descend


def test_title_and_message_are_composed_of_all_known_fields(tmp_path: Path) -> None:
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
    rules = {detector.kind: detector for detector in detectors}
    with HookLogger(model, tmp_path, alerts=rules) as logger:
        for step in range(11):
            if step != 1:
                logger.batch([step, f"file {step}"])
            descend(model, torch.ones(1, 2))
    begin, *others = logger.alerts
    assert begin.title == "root in fc at step 9"
    assert [alert.title for alert in others][-1] == "gone in gone resolved at step 10"
    worse = replace(begin, module_name=None, stage="escalated")
    assert worse.title == "root, then effect in fc at step 9"
    assert replace(worse, consequences=()).title == "root escalated at step 9"
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

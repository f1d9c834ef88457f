"""Verdicts on recorded runs stay, and the texts of alerts agree with the records."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from typing import Any

import pytest

from telemetry import StepRecord
from tests.helpers.recorded_runs import RUNS, VERDICTS, replay, verdicts

KNOWN = json.loads(VERDICTS.read_text(encoding="utf-8"))


def test_each_recording_has_verdicts() -> None:
    assert KNOWN.keys() == RUNS.keys()


@pytest.mark.parametrize("name", RUNS)
def test_verdicts_on_a_recorded_run_stay(name: str) -> None:
    assert verdicts(RUNS[name]) == KNOWN[name]


@pytest.mark.parametrize("norms_every", [1, 8])
@pytest.mark.parametrize("name", RUNS)
def test_a_machine_under_load_finds_the_same_kinds_and_layers(name: str, norms_every: int) -> None:
    loaded = replay.Machine(norms_every=norms_every, seed=1)
    [(_, alerts, *_)] = replay.replayed(RUNS[name], [10], loaded)
    found = {(a["kind"], a["module_name"]) for a in alerts if a["severity"] != "note"}
    assert found == {
        (kind, layer) for kind, _, layer, severity, *_ in KNOWN[name]["10"] if severity != "note"
    }


# --- texts ---------------------------------------------------------------------------------------


Records = dict[int, StepRecord]
NUMBER = r"(-?[\d.,]+(?:e[+-]?\d+)?)"
# What a text may assert, and what the records have to show.
CLAIMS: dict[str, Callable[[Records, int, tuple[str, ...]], bool]] = {
    rf"loss rose to {NUMBER}, and": lambda of, step, text: shown(of[step].loss, text[0], 4),
    rf"loss jumped from \S+ to {NUMBER} at step (\d+)": lambda of, step, text: shown(
        of[int(text[1])].loss, text[0], 4
    ),
    r"loss is (?:NaN|infinite) at step (\d+)": lambda of, step, text: (
        not math.isfinite(of[int(text[0])].loss or 0.0)
    ),
    rf"gradient norm is {NUMBER}, ": lambda of, step, text: shown(
        of[step].total_grad_norm, text[0], 3
    ),
    rf"learning rate is {NUMBER}\.": lambda of, step, text: shown(
        max(of[step].learning_rates), text[0], 3
    ),
    rf"learning rate jumped \S+ to {NUMBER} at step (\d+)": lambda of, step, text: shown(
        max(of[int(text[1])].learning_rates), text[0], 3
    ),
    r"(\w[\w.]*) \([\d.,]+x (?:above|below) usual at step (\d+)\)": lambda of, step, text: (
        text[0] in of[0].layout.owner_names and int(text[1]) <= step
    ),
}


def shown(value: float | None, text: str, digits: int) -> bool:
    return value is not None and value == pytest.approx(
        float(text.replace(",", "")), rel=0.5 * 10 ** (1 - digits)
    )


@pytest.fixture(scope="module")
def found() -> list[tuple[str, Records, dict[str, Any]]]:
    """The alerts of all recorded runs at every tenth step, with the run's records by step."""
    alerts = []
    for name, path in RUNS.items():
        file = replay.Recorded(path)
        events = [event for event in file.events if isinstance(event, dict)]
        records = {event["step"]: file.record(event, full=True) for event in events}
        [(_, of_run, *_)] = replay.replayed(path, (10,))
        alerts += [(name, records, alert) for alert in of_run if alert["stage"] != "resolved"]
    return alerts


def test_what_texts_assert_is_in_the_records(
    found: list[tuple[str, Records, dict[str, Any]]],
) -> None:
    checked, wrong = set(), list[str]()
    for name, records, alert in found:
        measured_at = alert["step"] if alert["measured_at"] is None else alert["measured_at"]
        assert measured_at <= alert["step"]
        texts = {f"{alert['summary']}. {alert['cause']}.": measured_at}
        texts |= {alert["added"]: alert["step"]} if alert["added"] else {}
        for (text, step), (pattern, holds) in itertools.product(texts.items(), CLAIMS.items()):
            for claim in re.finditer(pattern, text):
                checked.add(pattern)
                if not holds(records, step, claim.groups()):
                    wrong.append(f"{name}: {claim[0]}")
    assert wrong == []
    assert checked == CLAIMS.keys()


def test_modules_steps_and_batches_of_alerts_are_those_of_the_run(
    found: list[tuple[str, Records, dict[str, Any]]],
) -> None:
    for _, records, alert in found:
        assert alert["step"] in records
        assert all(batch["step"] in records for batch in alert["batches"])
        assert all(batch["step"] <= alert["step"] for batch in alert["batches"])
        modules = [module.name for module in records[0].layout.modules]
        for name in filter(None, (alert["module_name"], alert["observed_in"])):
            assert any(f"{module}.".startswith(f"{name}.") for module in modules)

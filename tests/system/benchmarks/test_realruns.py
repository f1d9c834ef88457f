"""A few real training runs and the verdicts on their alerts."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import realruns

import runs
from telemetry import Alert
from tests.helpers.rules import rule


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Only alerts are requested."""
    log = logging.getLogger("telemetry")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.mark.parametrize(
    ("name", "every"),
    [
        ("matrix_factorization", 1),  # wavers while its steps are large
        ("mixture_density", 10),
        ("actor_critic", 10),
        ("triplet_siamese", 10),
        ("experts_rate_jumps_ok", 10),  # some experts are given one token
    ],
)
def test_a_healthy_run_raises_no_alert(name: str, every: int) -> None:
    assert realruns.run_once("runs", name, every, 0).verdict in ("ok", "note")


FAULTS = {
    "encoder_under_no_grad": 100, "student_left_in_eval": 100, "target_spike": 100,
    "mask_hides_everything": 100, "classes_random_from_a_step": 100, "distance_of_zero": 100,
    "temperature_of_zero": 10,
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_correctly(name: str) -> None:
    outcome = realruns.run_once("runs", name, FAULTS[name], 0)
    assert (outcome.verdict, outcome.layer) in (("ok", True), ("ok", None))
    assert outcome.entries == 1


def test_every_run_has_a_label_and_every_label_a_kind_that_exists() -> None:
    assert set(runs.RUNS) == set(runs.LABELS)
    for kind in set().union(*(label.kinds for label in runs.LABELS.values())):
        rule(kind)


def alert(kind: str, step: int, severity: Any = "warning", **fields: Any) -> Alert:
    known = {"module_name": None, "value": 0.0, "threshold": 0.0, "summary": "seen"}
    return Alert(kind=kind, step=step, severity=severity, **(known | fields))


HEALTHY = realruns.Wanted(want="H", kinds=frozenset(), layers=(), onset=0, by=None)
FAULTY = realruns.Wanted(want="F", kinds=frozenset("k"), layers=("a.b",), onset=10, by=20)
GAP = replace(FAULTY, want="G", kinds=frozenset())


@pytest.mark.parametrize(
    ("label", "alerts", "verdict"),
    [
        (HEALTHY, [], ("ok", None)),
        (HEALTHY, [alert("k", 1, "note")], ("note", None)),
        (HEALTHY, [alert("k", 1)], ("FALSE ALARM", None)),
        (FAULTY, [], ("MISSED", None)),
        (FAULTY, [alert("k", 12, module_name="a.b.c")], ("ok", True)),
        (FAULTY, [alert("k", 12, "note", module_name="a.bc")], ("ok", False)),
        (FAULTY, [alert("k", 21, module_name="a.b")], ("LATE", True)),
        (FAULTY, [alert("k", 9)], ("EARLY", None)),
        (FAULTY, [alert("k", 9, "note"), alert("k", 12, module_name="a.b")], ("ok", True)),
        (FAULTY, [alert("other", 12)], ("WRONG KIND", None)),
        (FAULTY, [alert("other", 12, "note")], ("MISSED", None)),
        (FAULTY, [alert("k", 12, stage="resolved")], ("MISSED", None)),
        (GAP, [alert("other", 12, "note")], ("gap", None)),
        (GAP, [alert("other", 12)], ("WRONG KIND", None)),
    ],
)
def test_alerts_are_judged_by_kind_layer_step_and_severity(
    label: realruns.Wanted, alerts: list[Alert], verdict: tuple[str, bool | None]
) -> None:
    assert realruns.judged(label, alerts) == verdict

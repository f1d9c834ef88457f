"""Findings of a detector in single steps, and when they start and resolve an alert."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import telemetry
from telemetry import Alert, Baseline, Detector, Finding, HookLogger, StepRecord, limit, state
from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.rules import default_rule
from tests.helpers.scripted import Scripted, at, finding, record


def reported(detector: Detector, records: Iterable[StepRecord]) -> list[tuple[int, str]]:
    return [(alert.step, alert.stage) for alert in alerts_of(records, [detector])]


def steps(count: int, **known: Any) -> list[StepRecord]:
    return [record(step, **known) for step in range(count)]


# --- stages --------------------------------------------------------------------------------------

SEVERITIES = ["warning", "warning", "error", "error", "warning", "error"]


@pytest.mark.parametrize(
    ("found", "how", "expected"),
    [
        # Consecutive findings start an alert, a confirmed one at once.
        (at(0, 2, 3, 4), {"confirm_after": 3}, [(4, "started"), (5, "resolved")]),
        (at(0, 2, 3), {"confirm_after": 3}, []),
        (at(4, confirmed=True), {"confirm_after": 3}, [(4, "started"), (5, "resolved")]),
        # Consecutive evaluations without a finding resolve it.
        (at(0, 2), {"clear_after": 2}, [(0, "started"), (4, "resolved")]),
        (at(0, 2), {"clear_after": 3}, [(0, "started"), (5, "resolved")]),
        # An unconfirmed finding keeps it active, and so does a fault that is still present.
        (at(0, 1, 3), {"confirm_after": 2, "clear_after": 2}, [(1, "started"), (5, "resolved")]),
        (at(0), {"lasts_at": range(2, 6), "clear_after": 2}, [(0, "started"), (7, "resolved")]),
        # It may have ended already, or be a single event.
        (at(7, started_at=5, resolved=True), {}, [(5, "started"), (7, "resolved")]),
        (at(2, 3, momentary=True), {}, [(2, "started"), (3, "started")]),
        # A warning that becomes an error escalates once, and a finding may escalate anyway.
        (
            {step: finding(severity=severity) for step, severity in enumerate(SEVERITIES)},
            {"clear_after": 9}, [(0, "started"), (2, "escalated")],
        ),
        (at(0, 1, 2) | at(3, escalates=True), {"clear_after": 9},
         [(0, "started"), (3, "escalated")]),
    ],
)  # fmt: skip
def test_findings_start_escalate_and_resolve_an_alert(
    found: dict[int, Finding], how: dict[str, Any], expected: list[tuple[int, str]]
) -> None:
    assert reported(Scripted(found, **how), steps(9)) == expected


@pytest.mark.parametrize(
    ("on", "needs", "requests"),
    [
        # Found at step 0, not at 2, then at 4, 6 and 8: a light step between changes nothing.
        ("full", False, [0, 1, 4, 5, 6, 7]),
        ("step", False, []),
        ("step", True, [*range(10)]),
    ],
)
def test_full_steps_are_requested_until_a_finding_of_them_is_confirmed(
    on: str, needs: bool, requests: list[int]
) -> None:
    detector = Scripted(at(0, 4, 6, 8), on=on, confirm_after=3, needs_full_step=needs)
    found = []
    for step in range(10):
        alerts_of([record(step, full=step % 2 == 0)], [detector])
        found += [step] if detector.requests_full_step else []
    assert found == requests


@pytest.mark.parametrize(
    ("on", "evaluated"), [("step", [0, 1, 2, 3, 4]), ("full", [0, 3]), ("loss", [0, 1])]
)
def test_only_the_selected_steps_are_evaluated(on: str, evaluated: list[int]) -> None:
    detector = Scripted(at(*range(5), momentary=True), on=on)
    losses = [1.0, 2.0, None, math.nan, math.inf]
    records = [
        record(step, full=step in (0, 3), scalars={} if loss is None else {"loss": loss})
        for step, loss in enumerate(losses)
    ]
    assert [step for step, _ in reported(detector, records)] == evaluated


def test_only_evaluated_steps_count_towards_resolving() -> None:
    detector = Scripted(at(0), on="full", clear_after=2)
    records = [record(step, full=step % 10 == 0) for step in range(30)]
    assert reported(detector, records) == [(0, "started"), (20, "resolved")]


def test_the_resolved_alert_names_its_kind_module_and_step() -> None:
    detector = Scripted(at(3, module_name="fc_1"), kind="my_kind", severity="error")
    begin, end = alerts_of(steps(5), [detector])
    assert (begin.kind, begin.module_name, begin.severity) == ("my_kind", "fc_1", "error")
    assert (begin.value, begin.threshold, begin.summary) == (1.0, 0.0, "Seen")
    assert (begin.advice, begin.message) == (("Advice",), "Seen.\nAdvice.")
    assert (end.stage, end.step, end.title) == ("resolved", 4, "my_kind in fc_1 resolved at step 4")
    assert (end.advice, figures(end.summary)) == ((), [3])
    assert end.severity == "warning"


# --- losses --------------------------------------------------------------------------------------


class NoLoss(Detector):
    """Detector that counts NaN losses, and finds a fault at most steps."""

    kind = "no_loss"
    severity = "error"
    confirm_after = "losses"
    losses: int = limit(3, "Losses.")
    share: float = limit(0.5, "Share.")
    _bad: int = state(0)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        return finding() if (record.step + 1) % 7 > self.share else None

    def find_in_loss(self, step: int, loss: float) -> Finding | None:
        self._bad += math.isnan(loss)
        return finding(value=self._bad) if self._bad >= self.losses else None


def test_the_third_nan_loss_is_reported_before_its_step_ends() -> None:
    detector = NoLoss()
    alerts = [alert for _ in range(9) for alert in detector.on_loss(5, math.nan)]
    assert [(alert.step, alert.value) for alert in alerts] == [(5, 3.0)]


# --- limits --------------------------------------------------------------------------------------


class Stricter(NoLoss):
    losses: int = limit(2, "Fewer losses.")
    depth: int = limit(4, "Depth.")
    counted: int = state(0)
    number = 3


def test_users_set_the_declared_limits_of_a_class_and_its_bases() -> None:
    assert NoLoss.limits() == {"losses": "Losses.", "share": "Share."}
    assert Stricter.limits() == {"losses": "Fewer losses.", "share": "Share.", "depth": "Depth."}
    detector = Stricter(losses=5, share=0.1)
    assert (detector.losses, detector.share, detector.depth) == (5, 0.1, 4)
    assert (Stricter().losses, Stricter.losses) == (2, 2)
    assert reported(detector, steps(9)) == [(4, "started"), (6, "resolved")]


@pytest.mark.parametrize("name", ["los", "_bad", "counted", "number", "clear_after", "kind"])
def test_an_unknown_limit_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
        Stricter(**{name: 1})


def test_a_limit_that_is_replaced_without_a_declaration_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Lax\.losses: declare it as losses: .* = limit\("):
        type("Lax", (NoLoss,), {"losses": 5})


@pytest.mark.parametrize(
    ("name", "value"),
    [("kind", "My kind!"), ("on", "sometimes"), ("severity", "fatal"), ("confirm_after", 0),
     ("confirm_after", "loses"), ("explained_by", "nonfinite")],
)  # fmt: skip
def test_a_detector_class_with_a_wrong_attribute_is_refused(name: str, value: object) -> None:
    kind = type("Wrong", (NoLoss,), {name: value})
    with pytest.raises(ValueError, match=rf"^Wrong\.{name} = {re.escape(repr(value))}: must be "):
        kind()
    with pytest.raises(ValueError, match=r"^Nameless\.kind = None: must be letters"):
        type("Nameless", (Detector,), {})()


# --- in a logger ---------------------------------------------------------------------------------


def train(log_dir: Path, steps: int, *, large_at: range = range(0), **settings: Any) -> HookLogger:
    """Train a layer whose biases are large at some steps."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with HookLogger(model, log_dir, every_n_steps=10, **settings) as logger:
        for step in range(steps):
            if step in (large_at.start, large_at.stop):
                nn.init.constant_(model.bias, 30.0 if step in large_at else 0.0)
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            logger.flush()
    return logger


class LargeBias(Detector):
    kind = "large_bias"
    on = "full"
    confirm_after = 2
    largest: float = limit(10.0, "Largest bias.")

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        largest = float(record.weights["bias"].sketch.max)
        if largest <= self.largest:
            return None
        seen = f"The largest bias is {largest:.3g} at age {baseline.age}"
        return finding(value=largest, threshold=self.largest, summary=seen)


@pytest.mark.parametrize("form", ["list", "dict"])
def test_a_custom_detector_reports_the_start_and_the_end_of_a_fault(
    tmp_path: Path, form: str
) -> None:
    own, received = LargeBias(largest=20.0), list[Alert]()
    alerts: Any = [default_rule(), own] if form == "list" else {"large_bias": own}
    train(tmp_path, 60, large_at=range(20, 40), alerts=alerts, on_alert=received.append)
    begin, end = (alert for alert in received if alert.kind == "large_bias")
    assert (begin.stage, end.stage) == ("started", "resolved")
    assert 20 < begin.step < 30  # requested after step 20; the next due one is 30
    assert end.step == 40
    assert begin.threshold == 20.0
    assert 20 < begin.value < 30
    assert figures(begin.summary)[-1] == begin.step  # the age of the baseline


def test_a_note_is_kept_written_logged_at_info_and_passed_on_but_not_raised(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    note, seen = at(1, summary="Perhaps meant so", momentary=True), list[Alert]()
    with caplog.at_level(logging.INFO, "telemetry"):
        logger = train(tmp_path, 4, alerts=[Scripted(note, severity="note")], on_alert="raise")
    assert [alert.severity for alert in logger.alerts] == ["note"]
    assert [alert.severity for alert in telemetry.read(tmp_path).alerts] == ["note"]
    assert [r.levelname for r in caplog.records if "Perhaps" in r.getMessage()] == ["INFO"]
    train(tmp_path / "again", 4, alerts=[Scripted(note, severity="note")], on_alert=seen.append)
    assert [alert.severity for alert in seen] == ["note"]

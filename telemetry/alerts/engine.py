"""Engine: applies the detectors to each step, and reports one alert for each root cause."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

from telemetry.alert import Alert, Consequence, Severity
from telemetry.alerts import shared
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector
from telemetry.alerts.state import restore, to_plain
from telemetry.records import StepRecord
from telemetry.records.step import is_inside
from telemetry.rule import Rule


class Engine(Rule):
    """Detectors of a run; a fault that another one explains is suppressed.

    If several faults start at the same step, the root cause is that of a detector which none of the
    others comes ``after``.
    A fault that starts within 200 steps of one that explains it is suppressed: the root cause lists
    it as a consequence. It is reported itself if it is still present when the root cause resolves.
    The root cause escalates, and says what was added, if the consequence is an error
    and the root cause was a warning, or if it is persistent: NaN, dead units and the like.

    A learning rate that has just jumped above all former ones is the cause of each fault that large
    steps may explain.

    Args:
        detectors: In any order.
        severities: For some kinds of alerts, another severity than the detector's own.
        every_step: Whether the detectors must judge every step, also where all figures are usual.
        interval: Steps between two records.
    """

    name = "default_rules"
    requests_full_step: bool = False
    _reported: dict[str, _Reported]
    _suppressed: dict[str, tuple[Alert, str]]  # alert that was not reported, kind of its root cause

    def __init__(
        self,
        detectors: Sequence[Detector],
        *,
        severities: Mapping[str, Severity] | None = None,
        every_step: bool = False,
        interval: float = 1,
    ) -> None:
        detectors = _causes_first(detectors)
        self._detectors = {detector.kind: detector for detector in detectors}
        self._of_light_steps = [detector for detector in detectors if detector.on != "full"]
        self._every_step = every_step
        self._severities = dict(severities or {})
        self._baseline = Baseline(interval)
        self._reported, self._suppressed = {}, {}

    def __repr__(self) -> str:
        return f"<{self.name}: {', '.join(self._detectors)}>"

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        detectors = self._detectors.values()
        alerts, errors = _found_by({d.kind: d.on_loss for d in detectors}, step, loss)
        return self._report(alerts, errors) if alerts or errors else ()

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._baseline.add(record)
        detectors = self._detectors.values() if record.full else self._of_light_steps
        found = _found_by({d.kind: d.evaluate for d in detectors}, record, self._baseline)
        # Unusual norms are a reason to begin: a full step does not decide on them.
        is_unusual = self._baseline.layers.are_unusual and not record.full
        self.requests_full_step = is_unusual or any(self._requesting)
        return self._report(*found)

    @property
    def full_steps_needed(self) -> int:
        return max([detector.full_steps_needed for detector in self._requesting], default=1)

    @property
    def _requesting(self) -> list[Detector]:
        return [detector for detector in self._detectors.values() if detector.requests_full_step]

    @property
    def requests_norms_above(self) -> float:
        unconfirmed = [d.kind for d in self._of_light_steps if d.is_unconfirmed]
        return -math.inf if unconfirmed or self._every_step else self._baseline.loss_limit

    def state_dict(self) -> dict[str, Any]:
        return {name: to_plain(part) for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what fits. A detector whose state does not fit starts without one.

        Raises:
            ValueError: Some detectors reset, or do not exist; the others continue.
        """
        parts = self._parts()
        problems = [f"there is no rule {name}" for name in state if name not in parts]
        for name, part in parts.items():
            try:
                restore(part, state[name])
            except (TypeError, ValueError, KeyError):
                problems.append(f"{name} resets")
        if problems:
            raise ValueError(", ".join(problems))

    def _parts(self) -> dict[str, object]:
        return {"engine": self, "baseline": self._baseline, **self._detectors}

    # --- root causes and consequences ------------------------------------------------------------

    def _report(self, alerts: list[Alert], errors: dict[str, Exception]) -> Iterator[Alert]:
        yield from self._reportable(alerts)
        if errors:
            self.failed, error = next(iter(errors.items()))
            raise error

    def _reportable(self, alerts: list[Alert]) -> list[Alert]:
        reported: list[Alert] = []
        # A note explains nothing, so it comes after its possible causes of the same step.
        for alert in sorted(map(self._graded, alerts), key=lambda alert: alert.severity == "note"):
            if alert.stage == "resolved":
                reported += self._resolve(alert)
            elif (cause := self._cause_of(alert)) is None:
                by_rate = self._baseline.follows_rate_jump
                self._reported[alert.kind] = _Reported(alert=alert, by_rate=by_rate)
                reported.append(alert)
            else:
                reported = self._add_consequence(cause, alert, reported)
        return reported

    def _graded(self, alert: Alert) -> Alert:
        """Return the alert with the user's severity, and with a jump of the rate as its cause."""
        if alert.stage == "resolved":
            return alert
        name, baseline = alert.module_name, self._baseline
        if self._detectors[alert.kind].explained_by_rate_jump and baseline.follows_rate_jump:
            name = next(iter(baseline.jumped), None) if name is None else name
            rate, step = baseline.new_rate_in_words, baseline.rate_jump_step
            cause = f"The learning rate jumped to {rate} at step {step}"
            advice = shared.FIX_RATE
            alert = replace(alert, module_name=name, cause=cause, advice=advice, batches=())
        return replace(alert, severity=self._severities.get(alert.kind, alert.severity))

    def _resolve(self, alert: Alert) -> list[Alert]:
        """Report that a fault resolved, and its consequences that are still present."""
        self._suppressed.pop(alert.kind, None)
        if self._reported.pop(alert.kind, None) is None:
            return []
        left = [found for found, cause in self._suppressed.values() if cause == alert.kind]
        for found in left:
            del self._suppressed[found.kind]
        survivors = [
            replace(found, stage="started", step=alert.step, measured_at=_measured_at(found))
            for found in left
            if self._detectors[found.kind].persistent
        ]
        return [alert, *self._reportable(survivors)]

    def _cause_of(self, alert: Alert) -> _Reported | None:
        if alert.kind in self._suppressed:
            return self._reported.get(self._suppressed[alert.kind][1])
        if alert.stage != "started":
            return None
        detector, interval = self._detectors[alert.kind], self._baseline.interval
        known = [
            reported
            for kind, reported in self._reported.items()
            if kind in detector.explained_by
            and _may_explain(reported, alert, interval)
            and detector.may_follow(reported.alert)
        ]
        return min(known, key=lambda reported: reported.alert.step, default=None)

    def _add_consequence(
        self, cause: _Reported, alert: Alert, reported: list[Alert]
    ) -> list[Alert]:
        before, is_note = cause.alert, alert.severity == "note"
        consequence = Consequence(kind=alert.kind, module_name=alert.module_name)
        is_new = consequence not in before.consequences
        rises = (before.severity, alert.severity) == ("warning", "error")
        others = [known for known in before.consequences if known != consequence]
        is_latest = is_new or rises  # the title names it
        changes: dict[str, Any] = {
            "severity": "error" if rises else before.severity,
            "consequences": (*others, consequence) if is_latest else before.consequences,
            "batches": before.batches or alert.batches,
        }
        after = replace(before, **changes)
        self._suppressed[alert.kind] = alert, before.kind
        self._reported[before.kind] = replace(cause, alert=after, last=alert.step)
        for index, item in enumerate(reported):
            if item.kind == before.kind and item.stage != "resolved":
                if is_new and item.stage == "escalated" and not is_note:
                    news = "summary" if item.added is None else "added"
                    changes[news] = f"{getattr(item, news)}; {alert.summary}"
                reported[index] = replace(item, **changes)
                return reported
        if rises or (is_new and not is_note and self._detectors[alert.kind].persistent):
            worse = replace(
                after,
                stage="escalated",
                step=alert.step,
                value=alert.value,
                threshold=alert.threshold,
                added=alert.summary,
                measured_at=_measured_at(before),
            )
            return [*reported, worse]
        return reported


def _measured_at(alert: Alert) -> int:
    """Return the step of the figures in the summary."""
    return alert.step if alert.measured_at is None else alert.measured_at


def _causes_first(detectors: Sequence[Detector]) -> list[Detector]:
    """Return the detectors, each behind those that may explain a fault of the same step."""
    by_kind = {detector.kind: detector for detector in detectors}
    before = {
        kind: [
            cause
            for cause in sorted((detector.explained_by | detector.after) & by_kind.keys())
            if cause in detector.after
            or kind not in by_kind[cause].explained_by | by_kind[cause].after
        ]
        for kind, detector in by_kind.items()
    }
    return [by_kind[kind] for kind in TopologicalSorter(before).static_order()]


def _found_by(
    judges: Mapping[str, Callable[..., Iterable[Alert]]], *judged: Any
) -> tuple[list[Alert], dict[str, Exception]]:
    """Return the alerts of detectors, and what some raise, by kind: it does not stop the others."""
    alerts, errors = list[Alert](), dict[str, Exception]()
    for kind, judge in judges.items():
        try:
            alerts.extend(judge(*judged))
        except Exception as error:  # of any detector, perhaps the user's
            errors[kind] = error
    return alerts, errors


@dataclass(frozen=True, kw_only=True)
class _Reported:
    """An alert that was reported."""

    alert: Alert
    last: int = -1  # the last step at which it had a consequence
    by_rate: bool  # the learning rate had jumped when it started


def _may_explain(reported: _Reported, alert: Alert, interval: float) -> bool:
    """Whether a reported alert may be the root cause of a later one.

    A note explains no warning, and one unreached layer explains no other. A loss that jumps because
    of the learning rate may cause explosions; otherwise explosions come first.
    """
    cause = reported.alert
    if alert.step - max(cause.step, reported.last) > _REACH * interval:
        return False
    if cause.severity == "note" and alert.severity != "note":
        return False
    if cause.kind == "loss_spike" and alert.kind.startswith("exploding"):
        return reported.by_rate
    if "untrained_parameters" not in (cause.kind, alert.kind):
        return True
    inner, outer = sorted((cause.module_name or "", alert.module_name or ""), key=len)[::-1]
    return is_inside(inner, outer)


_REACH = 200  # steps; chosen manually; tried 40 and 1000

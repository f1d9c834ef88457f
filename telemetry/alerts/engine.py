"""Applies the detectors to each step, and tells one alert for each cause."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from telemetry.alert import Alert, Severity
from telemetry.alerts.baseline import Baseline
from telemetry.alerts.detector import Detector
from telemetry.alerts.state import restore, to_plain
from telemetry.plain_text import steps_in_words
from telemetry.records import StepRecord
from telemetry.records.step import is_inside
from telemetry.rule import Rule


class Engine(Rule):
    """The detectors of a run, of whose faults only the first cause is told.

    If several faults begin at the same step, the one whose detector comes first is the cause. Those
    that begin within 200 steps of one that explains them are its consequences: they are listed in
    its alert and not reported themselves, unless they are still there when it is over. The cause is
    reported again, as worse and with the figures of the consequence, if that is an error and the
    cause was a warning, or if it does not pass with the cause: NaN, dead units and the like.

    If the learning rate has just jumped above all former ones, a fault that may come from steps
    that are too large is said to come from that, and the advice is that for learning rates.

    It requests the full measurements that a detector needs, usually one, and another one if that
    leaves a suspicion. If they confirm nothing, the detector requests again after 20 steps at the
    earliest, then after 40, 80 and so on, and leaves the rest of the run's allowance to the others
    (exponential back-off). An alert ends that.

    Args:
        detectors: Causes before consequences.
        severities: For some kinds of alerts, another severity than the detector's own.
        every_step: Whether the detectors must judge every step, also where all figures are usual.
    """

    name = "default_rules"
    requests_full_step: bool = False
    _reported: dict[str, _Reported]
    _hidden: dict[str, _Hidden]
    _requests: dict[str, tuple[int, int, int]]  # of each detector: their beginning, pause, number

    def __init__(
        self,
        detectors: Sequence[Detector],
        *,
        severities: Mapping[str, Severity] | None = None,
        every_step: bool = False,
    ) -> None:
        self._detectors = {detector.kind: detector for detector in detectors}
        self._of_light_steps = [detector for detector in detectors if detector.on != "full"]
        self._of_losses = [detector for detector in detectors if detector.judges_losses]
        self._every_step = every_step
        self._severities = dict(severities or {})
        self._baseline = Baseline()
        self._reported = {}
        self._hidden = {}
        self._requests = {}

    def __repr__(self) -> str:
        return f"<{self.name}: {', '.join(self._detectors)}>"

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        found = _found_by(d.on_loss(step, loss) for d in self._of_losses)
        return self._told(*found)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._baseline.add(record)
        detectors = self._detectors.values() if record.full else self._of_light_steps
        found = _found_by(d.evaluate(record, self._baseline) for d in detectors)
        self._request(record, found[0])
        return self._told(*found)

    @property
    def loss_limit(self) -> float | None:
        waits = any(detector.is_unconfirmed for detector in self._of_light_steps)
        return None if waits or self._every_step else self._baseline.loss_limit

    def _request(self, record: StepRecord, alerts: Iterable[Alert]) -> None:
        """Request a full measurement if a detector that does not pause does."""
        if any(alert.stage != "resolved" for alert in alerts):
            self._requests = {}
        requesting = {
            kind: d.full_steps_needed for kind, d in self._detectors.items() if d.requests_full_step
        }
        if self._baseline.requests_full_step:
            requesting[_NORMS] = 1
        self.requests_full_step, step = False, record.step
        for kind, full_steps_in_a_row in requesting.items():
            began, pause, made = self._requests.get(kind, (step, 0, 0))
            if step >= began + pause:
                began, pause, made = step, max(_PAUSE, 2 * pause), 0
            # A full step that leaves a suspicion is followed by another one.
            goes_on = record.full and made < _CHAIN and kind != _NORMS
            if step < began + full_steps_in_a_row or goes_on:
                self.requests_full_step, made = True, made + 1
            self._requests[kind] = began, pause, made

    def state_dict(self) -> dict[str, Any]:
        """What this and its detectors remember, as numbers, strings, lists and dicts."""
        return {name: to_plain(part) for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. A detector whose state does not fit begins anew.

        Raises:
            ValueError: Some detectors begin anew, or do not exist; the others go on.
        """
        parts = self._parts()
        misfits = [f"there is no rule {name}" for name in state if name not in parts]
        for name, part in parts.items():
            try:
                restore(part, state[name])
            except (TypeError, ValueError, KeyError):
                misfits.append(f"{name} begins anew")
        if misfits:
            raise ValueError(", ".join(misfits))

    def _parts(self) -> dict[str, object]:
        """Everything that has a state, by name."""
        return {"engine": self, "baseline": self._baseline, **self._detectors}

    # --- causes and consequences -----------------------------------------------------------------

    def _told(self, alerts: list[Alert], errors: list[Exception]) -> Iterator[Alert]:
        yield from map(_with_consequences, self._reportable(alerts))
        if errors:
            raise errors[0]

    def _reportable(self, alerts: list[Alert]) -> list[Alert]:
        reported: list[Alert] = []
        # A note explains nothing. So it comes after what may explain it at the same step.
        for alert in sorted(map(self._graded, alerts), key=lambda alert: alert.severity == "note"):
            if alert.stage == "resolved":
                reported += self._end(alert)
            elif (cause := self._cause_of(alert)) is None:
                by_rate = self._baseline.follows_rate_jump
                self._reported[alert.kind] = _Reported(alert=alert, by_rate=by_rate)
                reported.append(alert)
            else:
                reported = self._add_consequence(cause, alert, reported)
        return reported

    def _graded(self, alert: Alert) -> Alert:
        if alert.stage == "resolved":
            return alert
        baseline, message = self._baseline, alert.message
        if self._detectors[alert.kind].explained_by_rate_jump and baseline.follows_rate_jump:
            seen = message.split("\n")[0]
            ago = steps_in_words(baseline.since_rate_jump)
            message = f"{seen[:-1]}, {ago} after the learning rate had jumped to "
            message += f"{baseline.jump}.\n{_RATE_ADVICE}"
            if alert.module_name is None and baseline.jumped:
                alert = replace(alert, module_name=baseline.jumped[0])
        severity = self._severities.get(alert.kind, alert.severity)
        return replace(alert, severity=severity, message=message)

    def _end(self, alert: Alert) -> list[Alert]:
        """Report the end of a fault that was reported, and consequences that outlive it."""
        self._hidden.pop(alert.kind, None)
        if self._reported.pop(alert.kind, None) is None:
            return []
        left = [hidden.alert for hidden in self._hidden.values() if hidden.cause == alert.kind]
        for survivor in left:
            del self._hidden[survivor.kind]
        lasting = [found for found in left if self._detectors[found.kind].persistent]
        return [alert, *self._reportable([_outlives(found, alert.step) for found in lasting])]

    def _cause_of(self, alert: Alert) -> _Reported | None:
        if alert.kind in self._hidden:
            return self._reported.get(self._hidden[alert.kind].cause)
        if alert.stage != "started":
            return None
        explaining = self._detectors[alert.kind].explained_by
        known = [
            reported
            for kind, reported in self._reported.items()
            if kind in explaining and _may_explain(reported, alert)
        ]
        return min(known, key=lambda reported: reported.alert.step, default=None)

    def _add_consequence(
        self, cause: _Reported, alert: Alert, reported: list[Alert]
    ) -> list[Alert]:
        before = after = cause.alert
        what = f"{alert.kind}{alert.where}"
        is_new = what not in before.consequences
        lasts = self._detectors[alert.kind].persistent and alert.severity != "note"
        rises = (before.severity, alert.severity) == ("warning", "error")
        if is_new:
            after = replace(before, consequences=(*before.consequences, what))
        if rises:
            after = replace(after, severity="error")
        self._hidden[alert.kind] = _Hidden(alert=alert, cause=before.kind)
        self._reported[before.kind] = replace(cause, alert=after, last=alert.step)
        for index, item in enumerate(reported):
            if item.kind == before.kind and item.stage != "resolved":
                is_seen = is_new and item.stage == "escalated" and alert.severity != "note"
                seen = _seen(item, alert) if is_seen else item
                reported[index] = replace(
                    seen, severity=after.severity, consequences=after.consequences
                )
                return reported
        return [*reported, _grown_worse(after, alert)] if rises or (lasts and is_new) else reported


def _found_by(looks: Iterable[Iterator[Alert]]) -> tuple[list[Alert], list[Exception]]:
    """What detectors find; one that raises, perhaps the user's, does not stop the others."""
    alerts: list[Alert] = []
    errors: list[Exception] = []
    for found in looks:
        try:
            alerts.extend(found)
        except Exception as error:  # of any detector
            errors.append(error)
    return alerts, errors


@dataclass(frozen=True, kw_only=True)
class _Reported:
    """An alert that was reported."""

    alert: Alert
    last: int = -1  # the last step at which it had a consequence
    by_rate: bool  # the learning rate had jumped when it began


@dataclass(frozen=True, kw_only=True)
class _Hidden:
    """An alert that was not reported, and the kind of the one that was reported instead."""

    alert: Alert
    cause: str


def _may_explain(reported: _Reported, alert: Alert) -> bool:
    """Whether it is near and fits: a note explains nothing, nor one unreached layer another.

    A loss that jumps because of the learning rate may make things explode; otherwise they come
    first.
    """
    cause = reported.alert
    if alert.step - max(cause.step, reported.last) > _REACH:
        return False
    if cause.severity == "note" and alert.severity != "note":
        return False
    if cause.kind == "loss_spike" and alert.kind.startswith("exploding"):
        return reported.by_rate
    if "untrained_parameters" not in (cause.kind, alert.kind):
        return True
    inner, outer = sorted((cause.module_name or "", alert.module_name or ""), key=len)[::-1]
    return is_inside(inner, outer)


def _seen(item: Alert, consequence: Alert) -> Alert:
    """An alert with the figures of a consequence, which is told before what it told."""
    seen = consequence.message.split("\n")[0]
    return replace(
        item,
        step=consequence.step,
        value=consequence.value,
        threshold=consequence.threshold,
        message=f"{seen} {item.message}",
    )


def _grown_worse(cause: Alert, consequence: Alert) -> Alert:
    """The alert that ``cause`` grew worse: what was seen is the consequence, with its figures."""
    since = f"It follows from the {cause.kind.replace('_', ' ')}{cause.where} of step {cause.step}."
    advice = cause.message.split("\n")[-1]
    return _seen(replace(cause, message=f"{since}\n{advice}", stage="escalated"), consequence)


def _outlives(consequence: Alert, step: int) -> Alert:
    """What was not reported, when its cause is over: with the figures and the step they are of."""
    seen, _, advice = consequence.message.partition("\n")
    seen += f" That was at step {consequence.step}, and it has not ended."
    return replace(consequence, step=step, message=f"{seen}\n{advice}")


def _with_consequences(alert: Alert) -> Alert:
    """The alert with its consequences as the second line of the message."""
    if not alert.consequences:
        return alert
    seen, _, advice = alert.message.partition("\n")
    kinds = (consequence.partition(" ") for consequence in alert.consequences)
    listed = ", ".join(f"{kind.replace('_', ' ')}{space}{where}" for kind, space, where in kinds)
    return replace(alert, message=f"{seen}\nIt leads to: {listed}.\n{advice}")


_RATE_ADVICE = (
    "People usually limit what a schedule can return, lower the learning rate or warm it up, and "
    "go on from a checkpoint before the jump."
)
_REACH = 200  # by eye, in steps; tried 40 and 1000
_PAUSE = 20  # steps, doubled each time: what was requested is there by then, unless rules are late
_CHAIN = 2  # requests before a pause, the second after the full step of the first; tried 1, 3
_NORMS = "norms"  # of the baseline, among the detectors

"""One cause, one alert: of faults that follow from each other, only the first is reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from telemetry.alert import Alert, Severity
from telemetry.alerts.course import Course
from telemetry.alerts.memory import lacks, restore, to_plain
from telemetry.records import StepRecord
from telemetry.rule import Rule
from telemetry.shared.plain_text import steps_in_words

_EXPLOSIONS = {"exploding_gradient", "exploding_activation"}
_LOSS = {"loss_divergence", "loss_spike"}
# Which faults may explain one.
CAUSES: dict[str, set[str]] = {
    "exploding_activation": {
        "exploding_gradient",
        "saturated_units",
        "dead_units",
        *_LOSS,
    },
    "exploding_gradient": {"exploding_activation", "saturated_units", *_LOSS},
    "saturated_units": _EXPLOSIONS | _LOSS,
    "dead_units": _EXPLOSIONS | _LOSS | {"nonfinite", "vanishing_gradient"},
    "vanishing_gradient": _EXPLOSIONS
    | _LOSS
    | {"dead_units", "saturated_units", "untrained_parameters"},
    "untrained_parameters": {"vanishing_gradient"},
    "nonfinite": _EXPLOSIONS | _LOSS | {"ranks_diverge"},
    "loss_divergence": _EXPLOSIONS | {"loss_spike", "dead_units", "saturated_units", "nonfinite"},
    "loss_spike": _EXPLOSIONS | {"loss_divergence", "dead_units", "saturated_units", "nonfinite"},
    "attention_collapse": {"logit_growth"},
    "loss_stuck": {"learning_rate_zero", "no_learning", "dead_units", "vanishing_gradient"},
    "no_learning": {"dead_units", "saturated_units", "vanishing_gradient", "nonfinite"},
}


class OneCause(Rule):
    """Combines several rules, so that a fault with many symptoms gives one alert.

    If several alerts begin at the same step, the one whose rule comes first is the cause. Faults
    that begin within 200 steps of one that may explain them are its consequences: they are listed
    in its alert and not reported themselves, unless they are still there when it is over. The cause
    is reported again, as worse and with the figures of the consequence, if that is an error and the
    cause was a warning, or if it does not pass with the cause: NaN, dead units and the like.

    If the learning rate has just jumped above all former ones, a fault that may come from steps
    that are too large is said to come from that, and the advice is that for learning rates.

    It also limits the full measurements that the rules ask for: three steps in a row, and no more
    before these are there; on average one in ten steps, in addition to the schedule.

    Args:
        rules: Causes before consequences.
        severities: For some kinds of alerts, another severity than the rule's own.
        course: The course that the rules share, to be saved with them.
    """

    _reported: dict[str, _Reported]
    _hidden: dict[str, _Hidden]
    _allowance: float
    _looks: int = 0
    _next_ask: int = 0
    _rate: float = 0.0
    wants_full: bool = False

    def __init__(
        self,
        rules: Sequence[Rule],
        *,
        severities: Mapping[str, Severity] | None = None,
        course: Course | None = None,
    ) -> None:
        self._rules = tuple(rules)
        self._of_losses = [rule for rule in rules if type(rule).on_loss is not Rule.on_loss]
        self._severities = dict(severities or {})
        self._course = course or Course()
        self._reported = {}
        self._hidden = {}
        self._allowance = _BURST

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """Judge a loss that was logged before its step ended."""
        alerts = [alert for rule in self._of_losses for alert in rule.on_loss(step, loss)]
        return self._sort_out(alerts) if alerts else ()

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        alerts = [alert for rule in self._rules for alert in rule(record)]
        self._ask(record.step)
        if self._course.since_rate_jump == 0:
            self._rate = max(record.learning_rates)
        return self._sort_out(alerts) if alerts else ()

    def _ask(self, step: int) -> None:
        """Begin to ask for several measurements, or go on with that."""
        self._allowance = min(_BURST, self._allowance + _PER_STEP)
        may_begin = self._looks == 0 and step >= self._next_ask and self._allowance >= 1
        if may_begin and any(rule.wants_full for rule in self._rules):
            self._looks, self._next_ask = _LOOKS, step + _PAUSE
        self.wants_full = self._looks > 0
        self._looks -= self.wants_full
        self._allowance -= self.wants_full

    def state_dict(self) -> dict[str, Any]:
        """What this and its rules remember, as numbers, strings, lists and dicts."""
        return {name: to_plain(part) for name, part in self._parts().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from there. A rule takes all of its state that it knows, or begins anew.

        Raises:
            ValueError: Some rules begin anew, or in part, or do not exist; the others go on.
        """
        parts = self._parts()
        misfits = [f"there is no rule {name}" for name in state if name not in parts]
        for name, part in parts.items():
            try:
                restore(part, state[name])
                if lacks(state[name], to_plain(part)):
                    misfits.append(f"{name} begins anew in part")
            except (TypeError, ValueError, KeyError):
                misfits.append(f"{name} begins anew")
        if misfits:
            raise ValueError(", ".join(misfits))

    def _parts(self) -> dict[str, object]:
        """Everything that has a state, by name."""
        rules = {rule.name: rule for rule in self._rules}
        return {"causes": self, "course": self._course, **rules}

    def _sort_out(self, alerts: list[Alert]) -> list[Alert]:
        return [_with_consequences(alert) for alert in self._reportable(alerts)]

    def _reportable(self, alerts: list[Alert]) -> list[Alert]:
        reported: list[Alert] = []
        for alert in map(self._graded, alerts):
            if alert.stage == "end":
                reported += self._end(alert)
            elif (cause := self._cause_of(alert)) is None:
                self._reported[alert.kind] = _Reported(
                    alert=alert, step=alert.step, by_rate=self._course.follows_rate_jump
                )
                reported.append(alert)
            else:
                reported = self._add_consequence(cause, alert, reported)
        return reported

    def _graded(self, alert: Alert) -> Alert:
        if alert.stage == "end":
            return alert
        since, message = self._course.since_rate_jump, alert.message
        if alert.kind in _OF_LARGE_STEPS and self._course.follows_rate_jump:
            seen, _ = message.split("\n")
            ago = steps_in_words(since)
            message = f"{seen[:-1]}, {ago} after the learning rate had jumped to {self._rate:.3g}."
            message += f"\n{_RATE_ADVICE}"
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
        lasting = [_outlives(found, alert.step) for found in left if found.kind in _STATES]
        return [alert, *self._reportable(lasting)]

    def _cause_of(self, alert: Alert) -> _Reported | None:
        if alert.kind in self._hidden:
            return self._reported.get(self._hidden[alert.kind].cause)
        if alert.stage != "begin":
            return None
        known = [
            self._reported[kind]
            for kind in CAUSES.get(alert.kind, ())
            if kind in self._reported and _may_explain(self._reported[kind], alert)
        ]
        near = [reported for reported in known if alert.step - reported.step <= _REACH]
        return min(near, key=lambda reported: reported.alert.step, default=None)

    def _add_consequence(
        self, cause: _Reported, alert: Alert, reported: list[Alert]
    ) -> list[Alert]:
        before = after = cause.alert
        what = f"{alert.kind}{alert.where}"
        lasts = alert.kind in _STATES and alert.severity != "note"
        rises = (before.severity, alert.severity) == ("warning", "error")
        worse = rises or (lasts and what not in before.consequences)
        if what not in before.consequences:
            after = replace(before, consequences=(*before.consequences, what))
        if rises:
            after = replace(after, severity="error")
        self._hidden[alert.kind] = _Hidden(alert=alert, cause=before.kind)
        cause.alert, cause.step = after, alert.step
        for index, item in enumerate(reported):
            if item.kind == before.kind and item.stage != "end":
                both = _joined(item, alert) if worse and item.stage == "worse" else item
                reported[index] = replace(
                    both, severity=after.severity, consequences=after.consequences
                )
                return reported
        return [*reported, _grown_worse(after, alert)] if worse else reported


@dataclass(kw_only=True)
class _Reported:
    """An alert that was reported.

    Attributes:
        step: The last step at which it had a consequence.
        by_rate: Whether the learning rate had jumped when it began.
    """

    alert: Alert
    step: int
    by_rate: bool


@dataclass(frozen=True, kw_only=True)
class _Hidden:
    """An alert that was not reported, and the kind of the one that was reported instead."""

    alert: Alert
    cause: str


def _may_explain(reported: _Reported, alert: Alert) -> bool:
    """Whether it fits: a note explains nothing, nor a layer without a gradient another.

    A loss that jumps because of the learning rate may make things explode; otherwise they come
    first.
    """
    cause = reported.alert
    if cause.severity == "note" and alert.severity != "note":
        return False
    if cause.kind == "loss_spike" and alert.kind in _EXPLOSIONS:
        return reported.by_rate
    if "untrained_parameters" not in (cause.kind, alert.kind):
        return True
    inner, outer = sorted((cause.module_name or "", alert.module_name or ""), key=len)[::-1]
    return f"{inner}.".startswith(f"{outer}.") or not outer


def _grown_worse(cause: Alert, consequence: Alert) -> Alert:
    """The alert that ``cause`` grew worse: what was seen is the consequence, with its figures."""
    seen, advice = consequence.message.split("\n")[0], cause.message.split("\n")[-1]
    since = f"It follows from the {cause.kind.replace('_', ' ')}{cause.where} of step {cause.step}."
    return replace(
        cause,
        step=consequence.step,
        value=consequence.value,
        threshold=consequence.threshold,
        message=f"{seen} {since}\n{advice}",
        stage="worse",
    )


def _joined(worse: Alert, consequence: Alert) -> Alert:
    """For another consequence at this step, which is told first."""
    seen, value, limit = (
        consequence.message.split("\n")[0],
        consequence.value,
        consequence.threshold,
    )
    return replace(worse, value=value, threshold=limit, message=f"{seen} {worse.message}")


def _outlives(consequence: Alert, step: int) -> Alert:
    """What was not reported, when its cause is over: with the figures and the step they are of."""
    seen, advice = consequence.message.split("\n")
    seen += f" That was at step {consequence.step}, and it has not ended."
    return replace(consequence, step=step, message=f"{seen}\n{advice}")


def _with_consequences(alert: Alert) -> Alert:
    """The alert with its consequences as the second line of the message."""
    if not alert.consequences:
        return alert
    seen, advice = alert.message.split("\n")
    listed = ", ".join(map(_in_words, alert.consequences))
    return replace(alert, message=f"{seen}\nIt leads to: {listed}.\n{advice}")


def _in_words(consequence: str) -> str:
    kind, space, where = consequence.partition(" ")
    return f"{kind.replace('_', ' ')}{space}{where}"


# Faults that do not pass with what caused them.
_STATES = {"saturated_units", "dead_units", "vanishing_gradient", "nonfinite"}

_OF_LARGE_STEPS = _EXPLOSIONS | {"dead_units", "saturated_units", "nonfinite"}
_RATE_ADVICE = (
    "People usually limit what a schedule can return, lower the learning rate or warm it up, and "
    "go on from a checkpoint before the jump."
)
_REACH = 200  # by eye, in steps; tried 40 and 1000
_LOOKS = 3  # one more than dead_units and saturated_units need; tried 2 and 5
# How much rules may cost, not what they find: at 2.4 rnn_drift is found four steps later. Tried 60.
_PAUSE = 19  # steps: what is asked for is there by then, unless rules are late
_BURST = 12.0
_PER_STEP = 0.1  # as much as every_n_steps=10; tried 0.02 and 0.5

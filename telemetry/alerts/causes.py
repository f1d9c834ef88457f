"""One cause, one alert: of the faults that follow from each other, the first is told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from telemetry.records import Alert, Rule, StepRecord

_EXPLOSIONS = {"exploding_gradient", "exploding_activation"}
_CAUSES: dict[str, set[str]] = {
    "exploding_activation": {"exploding_gradient", "saturated_units", "loss_divergence"},
    "exploding_gradient": {"exploding_activation", "saturated_units", "loss_divergence"},
    "saturated_units": _EXPLOSIONS | {"loss_divergence"},
    "dead_units": _EXPLOSIONS | {"loss_divergence", "nonfinite", "vanishing_gradient"},
    "vanishing_gradient": _EXPLOSIONS | {"dead_units", "saturated_units", "loss_divergence"},
    "nonfinite": _EXPLOSIONS | {"loss_divergence"},
    "loss_divergence": _EXPLOSIONS | {"dead_units", "saturated_units", "nonfinite"},
    "no_learning": {"dead_units", "saturated_units", "vanishing_gradient", "nonfinite"},
}
"""Which faults may explain one."""


@dataclass(kw_only=True)
class _Told:
    """An alert that was told, and when it was last seen to have an effect."""

    alert: Alert
    step: int


class OneCause:
    """Puts several rules together, so that a fault with many symptoms gives one alert.

    Of alerts that begin in the same step, the one whose rule is listed first leads; faults that
    follow within 200 steps of one that may explain them are its consequences. If a consequence is
    an error and the cause was a warning, the cause is told again, as worse.

    It also keeps within bounds what the rules ask for: on average one full measurement in ten
    steps beyond the schedule, twelve at once.

    Args:
        rules: Causes before consequences.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = tuple(rules)
        self._told: dict[str, _Told] = {}
        self._hidden: set[str] = set()
        self._allowance = _BURST
        self.wants_full = False

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        """A loss was logged, before its step."""
        asked: list[Callable[[int, float], Iterable[Alert]]] = [
            rule.on_loss for rule in self._rules if hasattr(rule, "on_loss")
        ]
        return self._sort_out([alert for on_loss in asked for alert in on_loss(step, loss)], step)

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        alerts = [alert for rule in self._rules for alert in rule(record)]
        self._allowance = min(_BURST, self._allowance + _PER_STEP)
        wanted = any(getattr(rule, "wants_full", False) for rule in self._rules)
        self.wants_full = wanted and self._allowance >= 1
        self._allowance -= self.wants_full
        return self._sort_out(alerts, record.step)

    def _sort_out(self, alerts: list[Alert], step: int) -> list[Alert]:
        told: list[Alert] = []
        for alert in alerts:
            if alert.stage == "end":
                self._told.pop(alert.kind, None)
                if alert.kind in self._hidden:
                    self._hidden.discard(alert.kind)
                else:
                    told.append(alert)
                continue
            cause = self._cause_of(alert, step)
            if cause is None:
                self._told[alert.kind] = _Told(alert=alert, step=step)
                told.append(alert)
                continue
            self._hidden.add(alert.kind)
            told = self._add_consequence(cause, alert, told, step)
        return told

    def _cause_of(self, alert: Alert, step: int) -> _Told | None:
        if alert.stage != "begin":
            return None
        causes = _CAUSES.get(alert.kind, set())
        known = [self._told[kind] for kind in causes if kind in self._told]
        near = [told for told in known if step - told.step <= _REACH]
        return min(near, key=lambda told: told.alert.step, default=None)

    def _add_consequence(
        self, cause: _Told, alert: Alert, told: list[Alert], step: int
    ) -> list[Alert]:
        where = f" in {alert.module_name}" if alert.module_name else ""
        before = cause.alert
        after = replace(before, consequences=(*before.consequences, f"{alert.kind}{where}"))
        worse = (before.severity, alert.severity) == ("warning", "error")
        if worse:
            after = replace(after, severity="error")
        cause.alert, cause.step = after, step
        if before in told:
            return [after if item is before else item for item in told]
        if worse:
            return [*told, replace(after, stage="worse", step=step)]
        return told


_REACH = 200
_BURST = 12.0
_PER_STEP = 0.1

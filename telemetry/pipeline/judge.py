"""Applies the rules to each step and each logged loss."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from telemetry.alert import Alert
from telemetry.capture.schedule import Schedule
from telemetry.failures import Failures
from telemetry.records import StepRecord
from telemetry.rule import Rule


class Judge:
    """Rules of a run, which judge each step in turn; one that raises does not stop the others."""

    def __init__(self, rules: Iterable[Rule], failures: Failures) -> None:
        self._rules = tuple(rules)
        self._failures = failures
        self._is_finite = True
        self._has_confirmed = False

    def judge(self, record: StepRecord) -> list[Alert]:
        """Return the alerts of a step."""
        is_finite = record.all_grads_finite and math.isfinite(record.loss or 0.0)
        self._has_confirmed |= self._is_finite and not is_finite
        self._is_finite = is_finite
        return self._alerts_of(lambda rule: rule(record))

    def judge_loss(self, step: int, loss: float) -> list[Alert]:
        """Return the alerts of a loss that was just logged."""
        return self._alerts_of(lambda rule: rule.on_loss(step, loss))

    def _alerts_of(self, apply: Callable[[Rule], object]) -> list[Alert]:
        """Return the alerts of all rules; the user's own may return anything."""
        alerts: list[Alert] = []
        for rule in self._rules:
            try:
                returned = apply(rule)
                for alert in returned if isinstance(returned, Iterable) else (returned,):
                    if not isinstance(alert, Alert):
                        raise TypeError(
                            f"a rule must return alerts, () for none; it returned {returned!r}"
                        )
                    self._has_confirmed |= alert.stage != "resolved"
                    alerts.append(alert)
            except BaseException:  # of any rule; sys.exit() would end the worker
                self._failures.report(f"to apply the rule {(rule.failed or rule.name)!r}")
        return alerts

    def request(self, schedule: Schedule, record: StepRecord) -> int:
        """Pass on the requests of the rules, which have judged the step; return that of full steps.

        The schedule may grant fewer: see :meth:`Schedule.judged`.
        """
        confirmed, self._has_confirmed = self._has_confirmed, False
        needed = [rule.full_steps_needed for rule in self._rules if rule.requests_full_step]
        return schedule.judged(
            record.step,
            full=record.full,
            confirmed=confirmed,
            needed=max(needed, default=0),
            norms_above=min([r.requests_norms_above for r in self._rules], default=math.inf),
            is_finite=self._is_finite,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each rule that has one, by its name."""
        states: dict[str, Any] = {}
        for name, rule in self._named():
            with self._failures.contained(f"to take the state of the rule {name!r}"):
                if state := rule.state_dict():
                    states[name] = state
        return states

    def load_state_dict(self, states: object) -> list[str]:
        """Restore the state of each rule; return what does not fit."""
        known = dict(states) if isinstance(states, Mapping) else {}
        misfits: list[str] = []
        for name, rule in self._named():
            try:
                if name in known:
                    rule.load_state_dict(known.pop(name))
                elif rule.state_dict():
                    misfits.append(f"{name} resets")
            except Exception as error:  # of any rule
                misfits.append(f"{name}: {error or repr(error)}")
        return misfits + [f"there is no rule {name}" for name in known]

    def _named(self) -> Iterator[tuple[str, Rule]]:
        """Yield the rules by name; the second and later ones of a name are numbered."""
        counts: Counter[str] = Counter()
        for rule in self._rules:
            counts[rule.name] += 1
            count = counts[rule.name]
            yield rule.name if count == 1 else f"{rule.name} {count}", rule

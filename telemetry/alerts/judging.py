"""Applies rules to steps: what they find, what they ask for, and what they remember."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from telemetry.alert import Alert
from telemetry.failures import Failures
from telemetry.records import StepRecord
from telemetry.rule import Rule


class Judge:
    """Several rules that look at each step in turn; one that raises does not stop the others.

    Args:
        rules: In the order in which they look.
        failures: Where a rule that raises is reported.
    """

    def __init__(self, rules: Iterable[Rule], failures: Failures) -> None:
        self._rules = tuple(rules)
        self._failures = failures
        self._is_finite = True
        self._has_confirmed = False

    @property
    def requests_full_step(self) -> bool:
        """Whether a rule requests a full measurement."""
        return any(rule.requests_full_step for rule in self._rules)

    @property
    def loss_limit(self) -> float | None:
        """The lowest limit of the rules; None if one of them judges every step."""
        limits = [limit for rule in self._rules if (limit := rule.loss_limit) is not None]
        return min(limits, default=math.inf) if len(limits) == len(self._rules) else None

    def take_confirmation(self) -> bool:
        """Whether an alert or a new NaN has come since the last call of this."""
        confirmed, self._has_confirmed = self._has_confirmed, False
        return confirmed

    def judge(self, record: StepRecord) -> Iterator[Alert]:
        """What the rules find in a step."""
        is_finite = record.all_grads_finite and math.isfinite(record.loss or 0.0)
        self._has_confirmed |= self._is_finite and not is_finite
        self._is_finite = is_finite
        for rule in self._rules:
            with self._failures.contained(f"to apply the rule {rule.name!r}"):
                yield from self._checked(rule(record))

    def judge_loss(self, step: int, loss: float) -> Iterator[Alert]:
        """What they find in a loss that was just logged."""
        for rule in self._rules:
            try:
                if (found := rule.on_loss(step, loss)) != ():
                    yield from self._checked(found)
            except Exception:  # of any rule
                self._failures.report(f"to apply the rule {rule.name!r}")

    def state_dict(self) -> list[dict[str, Any]]:
        """What each rule that remembers something knows, in their order."""
        states: list[dict[str, Any]] = []
        for name, rule in self._named():
            with self._failures.contained(f"to take the state of the rule {name!r}"):
                if state := rule.state_dict():
                    states.append({"rule": name, "state": state})
        return states

    def load_state_dict(self, states: object) -> list[str]:
        """Give each rule what it knew; returns in words what was left out."""
        known: dict[Any, Any] = {}
        for item in states if isinstance(states, list) else ():
            if isinstance(item, Mapping):
                known[item.get("rule")] = item.get("state")
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

    def _checked(self, found: object) -> Iterator[Alert]:
        """What a rule returned; the user's own may return anything."""
        for alert in found if isinstance(found, Iterable) else (found,):
            if not isinstance(alert, Alert):
                raise TypeError(f"a rule must return alerts, () for none; it returned {found!r}")
            self._has_confirmed |= alert.stage != "resolved"
            yield alert

    def _named(self) -> Iterator[tuple[str, Rule]]:
        """Rules by name; of several of one name the later ones have a number."""
        seen: Counter[str] = Counter()
        for rule in self._rules:
            seen[rule.name] += 1
            count = seen[rule.name]
            yield rule.name if count == 1 else f"{rule.name} {count}", rule

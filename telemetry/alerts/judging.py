"""Applies rules to steps: what they find, what they ask for, and what they remember."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts.history import carried
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
        for rule in self._rules:
            if asked := [name for name in _NO_LONGER_ASKED if hasattr(rule, name)]:
                failures.log_once(
                    f"the rule {rule.name!r} is shown every step now: its {', '.join(asked)} "
                    "are no longer asked and may go",
                    level=logging.INFO,
                )

    @property
    def wants_full(self) -> bool:
        """Whether a rule asks for full measurements."""
        return any(rule.wants_full for rule in self._rules)

    def judge(self, record: StepRecord) -> Iterator[Alert]:
        """What the rules find in a step."""
        for rule in self._rules:
            try:
                yield from _checked(rule(record))
            except Exception:  # of any rule
                self._report(rule)

    def judge_loss(self, step: int, loss: float) -> Iterator[Alert]:
        """What they find in a loss that was just logged."""
        for rule in self._rules:
            try:
                yield from _checked(rule.on_loss(step, loss))
            except Exception:  # of any rule
                self._report(rule)

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
                elif name == "default_rules" and known.pop(_FORMER_NAME, None) is not None:
                    misfits.append(f"{name}: their state is of an earlier release, they begin anew")
                elif rule.state_dict():
                    misfits.append(f"{name} begins anew")
            except Exception as error:  # of any rule
                misfits.append(f"{name}: {error or repr(error)}")
        return misfits + [f"there is no rule {name}" for name in known]

    def _report(self, rule: Rule) -> None:
        self._failures.report(f"to apply the rule {rule.name!r}")

    def _named(self) -> Iterator[tuple[str, Rule]]:
        """Rules by name; of several of one name the later ones have a number."""
        seen: Counter[str] = Counter()
        for rule in self._rules:
            seen[rule.name] += 1
            count = seen[rule.name]
            yield rule.name if count == 1 else f"{rule.name} {count}", rule


_FORMER_NAME = "OneCause"  # of the default rules, whose state had another form

# What a rule had once, to pass over steps at which it would find nothing.
_NO_LONGER_ASKED = ("quiet_steps", "pass_over", "narrow")


def _checked(found: object) -> Iterator[Alert]:
    """What a rule returned; the user's own may return anything."""
    for alert in found if isinstance(found, Iterable) else (found,):
        if not isinstance(alert, Alert):
            raise TypeError(f"a rule must return alerts, () for none; it returned {found!r}")
        yield alert


class Suspicion(Rule):
    """Never alerts; asks for full measurements so that the other rules see what just happened.

    A module's gradient norm is unusual when it differs tenfold, and by six mean deviations, from
    its running mean (of logarithms, over about ten steps), or is suddenly zero. Modules whose norm
    is often zero (experts, embeddings, every other step of a GAN) are ignored.
    """

    _names: tuple[str, ...] = ()
    _mean: NDArray[np.float64]
    _deviation: NDArray[np.float64]
    _zero_rate: NDArray[np.float64]
    _steps: int = 0
    _wanted: int = 0

    def __init__(self) -> None:
        self._mean = self._deviation = self._zero_rate = np.zeros(0)

    @property
    def wants_full(self) -> bool:
        """Whether the next steps should be measured in full."""
        return self._wanted > 0

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self._wanted -= record.full and self._wanted > 0
        if record.all_grads_finite and self._is_unusual(record):
            self._wanted = _FULL_STEPS
        return ()

    def _follow(self, names: tuple[str, ...]) -> None:
        self._mean = carried(self._mean, self._names, names, np.nan)
        self._deviation = carried(self._deviation, self._names, names, 0.0)
        self._zero_rate = carried(self._zero_rate, self._names, names, 0.0)
        self._names = names

    def _is_unusual(self, record: StepRecord) -> bool:
        if self._names is not record.layout.owner_names:
            self._follow(record.layout.owner_names)
        self._steps += 1
        levels, mean, deviation = record.owner_grad_levels, self._mean, self._deviation
        off, strange = levels - mean, False
        distance = np.abs(off)
        if np.count_nonzero(np.isfinite(distance)) < len(distance):
            zero, new = levels == -np.inf, np.isnan(mean)
            strange = bool(np.count_nonzero(zero & ~new & (self._zero_rate < _RARE)))
            self._zero_rate += _WEIGHT * (zero - self._zero_rate)
            np.copyto(mean, levels, where=new & ~zero)
            off[zero | new] = 0.0
            distance = np.where(zero, deviation, np.abs(off))
        else:
            self._zero_rate *= 1 - _WEIGHT
        far = distance > _DECADES
        if np.count_nonzero(far):
            strange |= bool((far & (distance > _DEVIATIONS * deviation)).any())
            off, distance = off.clip(-_DECADES, _DECADES), np.minimum(distance, _DECADES)
        deviation += _WEIGHT * (distance - deviation)
        mean += _WEIGHT * off
        return strange and self._steps > _SHORTEST_HISTORY


# These cost or save full measurements and decide nothing: no verdict changes at the values tried,
# but mlp_overwrite_tanh is found up to four steps earlier with smaller ones.
_DECADES = 1.0  # most healthy spikes of faultbench stay below it; tried 0.2 and 5
_DEVIATIONS = 6.0  # by eye; tried 1.2 and 30
_WEIGHT = 0.1  # a mean over about ten steps, by eye; tried 0.02 and 0.5
_RARE = 0.01  # by eye; tried 0.002 and 0.05
_SHORTEST_HISTORY = 10  # 1 / _WEIGHT, until when the mean is not settled; tried 5 and 20
_FULL_STEPS = 3  # one more than dead_units and saturated_units need; tried 1 and 6

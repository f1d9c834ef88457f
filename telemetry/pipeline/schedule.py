"""Applies the rules to each step, and selects the steps that are measured in full or have norms.

:mod:`telemetry.capture.budget` may postpone a full step.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from telemetry.alert import Alert
from telemetry.failures import Failures
from telemetry.records import StepRecord
from telemetry.rule import Rule

# Limit of requests that confirm nothing: a number of full steps, and a share of the due ones.
ALLOWANCE = 3
ALLOWANCE_SHARE = 0.25

_COUNTS = ("scheduled", "requested", "_judged_due", "_unconfirmed")


class Judge:
    """Rules of a run, which judge each step in turn; one that raises does not stop the others."""

    def __init__(self, rules: Iterable[Rule], failures: Failures) -> None:
        self._rules = tuple(rules)
        self._failures = failures
        self._is_finite = True
        self._has_confirmed = False

    @property
    def requests_full_step(self) -> bool:
        """Whether a rule requests a full step."""
        return any(rule.requests_full_step for rule in self._rules)

    @property
    def loss_limit(self) -> float | None:
        """The lowest limit of the rules; None if one of them judges every step."""
        limits = [limit for rule in self._rules if (limit := rule.loss_limit) is not None]
        return min(limits, default=math.inf) if len(limits) == len(self._rules) else None

    def take_confirmation(self) -> bool:
        """Whether an alert or a new NaN has come since the last call."""
        confirmed, self._has_confirmed = self._has_confirmed, False
        return confirmed

    def judge(self, record: StepRecord) -> Iterator[Alert]:
        """Yield the alerts of a step."""
        is_finite = record.all_grads_finite and math.isfinite(record.loss or 0.0)
        self._has_confirmed |= self._is_finite and not is_finite
        self._is_finite = is_finite
        for rule in self._rules:
            try:
                yield from self._checked(rule(record))
            except GeneratorExit:
                raise
            except BaseException:  # of any rule; sys.exit() would end the worker
                self._report(rule)

    def judge_loss(self, step: int, loss: float) -> Iterator[Alert]:
        """Yield the alerts of a loss that was just logged."""
        for rule in self._rules:
            try:
                if (found := rule.on_loss(step, loss)) != ():
                    yield from self._checked(found)
            except GeneratorExit:
                raise
            except BaseException:
                self._report(rule)

    def _report(self, rule: Rule) -> None:
        self._failures.report(f"to apply the rule {(rule.failed or rule.name)!r}")

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the states of the rules that have one, in their order."""
        states: list[dict[str, Any]] = []
        for name, rule in self._named():
            with self._failures.contained(f"to take the state of the rule {name!r}"):
                if state := rule.state_dict():
                    states.append({"rule": name, "state": state})
        return states

    def load_state_dict(self, states: object) -> list[str]:
        """Restore the state of each rule; return what does not fit."""
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
        """Yield the alerts that a rule returned; the user's own may return anything."""
        for alert in found if isinstance(found, Iterable) else (found,):
            if not isinstance(alert, Alert):
                raise TypeError(f"a rule must return alerts, () for none; it returned {found!r}")
            self._has_confirmed |= alert.stage != "resolved"
            yield alert

    def _named(self) -> Iterator[tuple[str, Rule]]:
        """Yield the rules by name; the second and later ones of a name are numbered."""
        counts: Counter[str] = Counter()
        for rule in self._rules:
            counts[rule.name] += 1
            count = counts[rule.name]
            yield rule.name if count == 1 else f"{rule.name} {count}", rule


class FullSteps:
    """Selects full steps: steps 0, N, 2N, ..., which are due, and those that rules request.

    Training does not wait for the rules, and each step is decided before the rules judge the one
    before it. A requested full step is therefore the second one after the judged step, or later.

    All rules share one allowance. Requests that confirm nothing add at most :data:`ALLOWANCE` full
    steps and :data:`ALLOWANCE_SHARE` of the due ones up to now. An alert, or a NaN after finite
    gradients, restores it. It is counted in judged steps, so that a repeated run requests the same.

    Args:
        every_n_steps: Distance N of the steps that are due.

    Attributes:
        scheduled, requested: Numbers of full steps up to now: due, and added by rules.

    Raises:
        TypeError: ``every_n_steps`` is not an ``int``.
        ValueError: It is below 1.
    """

    def __init__(self, every_n_steps: int) -> None:
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool):
            raise TypeError(f"HookLogger(every_n_steps={every_n_steps!r}): must be an int")
        if every_n_steps < 1:
            raise ValueError(f"HookLogger(every_n_steps={every_n_steps}): must be at least 1")
        self.scheduled = self.requested = 0
        self._every_n_steps = every_n_steps
        self._requested_at: set[int] = set()
        # Each counter has one thread that writes it.
        self._wanted = self._granted = 0
        self._judged_due = self._unconfirmed = 0
        self._resumed_at: int | None = None
        self._full: tuple[int, bool] | None = None  # the latest full step, and whether it was due

    def __call__(self, step: int) -> bool:
        """Whether the step is a full step; called on the training thread, in order of steps."""
        due = full = step % self._every_n_steps == 0
        if self._requested_at:
            named = {other for other in tuple(self._requested_at) if other <= step}
            self._requested_at -= named
            full |= bool(named)
        if self._wanted > self._granted and step != self._resumed_at:
            self._granted += 1
            full = True
        if self._full is not None and self._full[0] < step:  # that step has ended
            self.scheduled += self._full[1]
            self.requested += not self._full[1]
        self._full = (step, due) if full else None
        return full

    def grants(self, judge: Judge, step: int) -> bool:
        """Whether the allowance covers the full step that rules request after a judged step.

        Called once per judged step, on the worker.
        """
        self._judged_due += step % self._every_n_steps == 0
        if judge.take_confirmation():
            self._unconfirmed = 0
        limit = ALLOWANCE + ALLOWANCE_SHARE * self._judged_due
        return judge.requests_full_step and self._unconfirmed + 1 <= limit

    def request_at(self, step: int) -> None:
        """Make this step a full step, or the next one if it is already decided."""
        self._requested_at.add(step)
        self._unconfirmed += 1

    def request(self) -> None:
        """Add one full step; called on the worker."""
        self._wanted += 1
        self._unconfirmed += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the pending requests and the counters as numbers and lists."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        pending = self._wanted - self._granted
        return {"requested_at": sorted(self._requested_at), "pending": pending, **counts}

    def load_state_dict(self, run: Mapping[str, Any], step: int) -> None:
        """Restore the state ``full_steps`` of a run, with ``step`` in progress."""
        state = run.get("full_steps")
        state = state if isinstance(state, Mapping) else {}
        self._requested_at = {max(other, step + 1) for other in state.get("requested_at", ())}
        if run.get("full") is True:
            self._requested_at.add(step)
        self._wanted, self._granted = state.get("pending", 0), 0
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        self._resumed_at, self._full = step, None


# --- steps with norms ----------------------------------------------------------------------------

log = logging.getLogger("telemetry")

SHARE = 0.025  # of the training time, for the worker; the training thread takes a fifth as much

# Chosen manually, in steps.
FIRST_STEPS = 256  # norms are taken at each of them: the baseline is unknown before
MAX_EVERY = 64
DECISION_STEPS = 16  # steps with norms between decisions on the interval
DENSE_STEPS = 64  # after an unusual step: rules may need several to confirm a finding


class LightSteps:
    """Limits gradient norms and rules to 3 % of the time: norms at one step in ``every``.

    Full steps are not affected. After an unusual step, norms are taken at each of the next 64
    steps. A loss is compared with its limit when it is logged. If it is logged before the
    optimizer's step, the norms of that step are taken too.

    The training thread calls :meth:`have_norms` and :meth:`check_logged`; the worker decides.

    Args:
        limited: Whether the limit holds; if not, norms are taken at every step.

    Attributes:
        limited: False as well where a rule judges every step.
        every: 1 for steps of more than a few milliseconds.
        loss_tag: Tag of the loss; None while unknown.
        loss_limit: Losses above it are unusual.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self.every = 1
        self.loss_tag: str | None = None
        self.loss_limit = math.inf
        self.limited = limited
        self._dense_until = -1
        self._costs_s: deque[float] = deque(maxlen=DECISION_STEPS)
        self._steps_s: deque[float] = deque(maxlen=DECISION_STEPS)
        self._last: tuple[int, float] | None = None  # number and time of the last step
        self._undecided = FIRST_STEPS  # steps with norms until the next decision

    def have_norms(self, step: int) -> bool:
        """Whether the gradient norms of this step are taken."""
        return step % self.every == 0 or step <= self._dense_until

    def check_logged(self, step: int, values: Mapping[str, object]) -> bool:
        """Whether the values hold an unusual loss; then norms of the next 64 steps are taken."""
        loss = values.get(self.loss_tag) if self.loss_tag is not None else None
        if not isinstance(loss, float) or loss <= self.loss_limit:  # false for NaN
            return False
        self.take_next(step)
        return True

    def take_next(self, step: int) -> None:
        """Take the norms of each of the next 64 steps."""
        self._dense_until = max(self._dense_until, step + DENSE_STEPS)

    def add(self, step: int, wall_time: float, cost_s: float) -> None:
        """Add the worker's CPU time for one step; from time to time update ``every``."""
        if self._last is not None and step > self._last[0]:
            self._steps_s.append((wall_time - self._last[1]) / (step - self._last[0]))
        self._last = step, wall_time
        self._costs_s.append(cost_s)
        self._undecided -= 1
        if self._undecided > 0 or not self.limited or not self._steps_s:
            return
        self._undecided = DECISION_STEPS
        step_s = max(median(self._steps_s), 1e-6)
        every = min(math.ceil(median(self._costs_s) / (SHARE * step_s)), MAX_EVERY)
        if every > 1 and self.every == 1:
            log.info(
                "telemetry: steps take %.2g ms, so gradient norms are taken at one in %d, to stay "
                "within 3 %% of the time; max_overhead=math.inf takes them at each step; see the "
                "curve telemetry/norms_every_n_steps",
                step_s * 1e3,
                every,
            )
        self.every = max(every, 1)

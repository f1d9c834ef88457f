"""Decides which optimizer steps are measured in full.

:mod:`telemetry.capture.budget` may postpone a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from telemetry.alerts.judging import Judge

Schedule: TypeAlias = Callable[[int], bool]
"""Whether a step is measured in full. The answer must be the same on all ranks."""


def every(n: int) -> Schedule:
    """Steps 0, n, 2n, ...

    Raises:
        TypeError: ``n`` is not an ``int``.
        ValueError: ``n`` is below 1.
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"HookLogger(every_n_steps={n!r}): must be an int")
    if n < 1:
        raise ValueError(f"HookLogger(every_n_steps={n}): must be at least 1")
    return lambda step: step % n == 0


class FullSteps:
    """Which steps are measured in full: those that are due, and those that a rule requests.

    Rules judge a step on another thread, and training does not wait for them. For each step after
    which they request a full one, one more of those that are decided from then on is; as the next
    step is decided before the rules judge the one that ends, it is the second after that, or a
    later one.

    All rules of a run share one allowance: requests that confirm nothing take at most
    :data:`ALLOWANCE` full steps and :data:`ALLOWANCE_SHARE` of the due ones so far. An alert, or a
    NaN after finite gradients, restores it. It is counted in judged steps, so that a run that is
    repeated requests the same.

    Args:
        due: The steps that are due in any case.

    Attributes:
        scheduled, requested: Full steps so far: the due ones, and those that rules added.
    """

    def __init__(self, due: Schedule) -> None:
        self.scheduled = self.requested = 0
        self._due = due
        self._named: set[int] = set()
        # Each has one thread that counts.
        self._wanted = self._given = 0
        self._judged_due = self._unconfirmed = 0
        self._resumed_at: int | None = None
        self._decided: tuple[int, bool, bool] | None = None  # which step, whether due, whether full

    def __call__(self, step: int) -> bool:
        """Whether the step is measured in full; asked on the training thread, in their order."""
        due = full = self._due(step)
        if self._named:
            named = {other for other in tuple(self._named) if other <= step}
            self._named -= named
            full |= bool(named)
        if self._wanted > self._given and step != self._resumed_at:
            self._given += 1
            full = True
        if self._decided is not None and self._decided[0] < step:  # that step has ended
            _, was_due, was_full = self._decided
            self.scheduled += was_due
            self.requested += was_full and not was_due
        self._decided = (step, due, full) if full else None
        return full

    def grants(self, judge: Judge, step: int) -> bool:
        """Whether the rules request a full measurement after this step and the allowance has one.

        Called once for each judged step, on the thread of the rules.
        """
        self._judged_due += self._due(step)
        if judge.take_confirmation():
            self._unconfirmed = 0
        limit = ALLOWANCE + ALLOWANCE_SHARE * self._judged_due
        return judge.requests_full_step and self._unconfirmed + 1 <= limit

    def ask(self, step: int) -> None:
        """Have this step measured in full, or the next one if it is decided already."""
        self._named.add(step)
        self._unconfirmed += 1

    def want(self) -> None:
        """Have one more step measured in full; on the thread of the rules."""
        self._wanted += 1
        self._unconfirmed += 1

    def state_dict(self) -> dict[str, Any]:
        """What is known of later steps, and the counts, in numbers and lists."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        return {"asked": sorted(self._named), "wanted": self._wanted - self._given, **counts}

    def load_state_dict(self, run: Mapping[str, Any], step: int) -> None:
        """Go on from there, with ``step`` in progress, which is measured as it was.

        Args:
            run: The state of the run, of which this is ``full_steps``, if it is there.
            step: Its number.
        """
        state = run.get("full_steps")
        state = state if isinstance(state, Mapping) else {}
        self._named = {max(other, step + 1) for other in state.get("asked", ())}
        if run.get("full") is True:
            self._named.add(step)
        self._wanted, self._given = state.get("wanted", 0), 0
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        self._resumed_at, self._decided = step, None


# Full steps, and a part of the due ones: what requests that confirm nothing may add.
ALLOWANCE = 3
ALLOWANCE_SHARE = 0.25

_COUNTS = ("scheduled", "requested", "_judged_due", "_unconfirmed")

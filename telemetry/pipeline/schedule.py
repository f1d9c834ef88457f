"""Decides which optimizer steps are measured in full.

:mod:`telemetry.capture.budget` may postpone a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

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
    """Which steps are measured in full: those that are due, and those that a rule asks for.

    Rules judge a step on another thread, and training does not wait for them: what they ask for is
    the first step that begins after their answer. A full step that had already begun by then
    answers what earlier steps asked for.

    Args:
        due: The steps that are due in any case.

    Attributes:
        announce: Set where several ranks train together: called with a step after which rules want
            a full measurement, to name one to all ranks.
    """

    def __init__(self, due: Schedule) -> None:
        self.announce: Callable[[int], None] | None = None
        self._due = due
        self._asked: set[int] = set()
        self._latest = -1  # that is measured in full

    def __call__(self, step: int) -> bool:
        """Whether the step is measured in full; asked on the training thread, in their order."""
        asked = {other for other in tuple(self._asked) if other <= step}
        self._asked -= asked
        full = self._due(step) or bool(asked)
        if full:
            self._latest = step
        return full

    def ask(self, step: int) -> None:
        """Have this step measured in full, or the next one if it has begun."""
        self._asked.add(step)

    def answer(self, step: int, *, wanted: bool) -> None:
        """The rules have judged this step; called on their thread.

        Args:
            step: The step.
            wanted: Whether they want a full measurement after it.
        """
        if not wanted:
            return
        if self.announce is not None:
            self.announce(step)
        elif step >= self._latest:
            self.ask(step + 1)

    def state_dict(self) -> dict[str, Any]:
        """What is known of later steps, in numbers and lists."""
        return {"asked": sorted(self._asked)}

    def load_state_dict(self, state: object) -> None:
        """Go on from there, if it is such a state."""
        self._asked = set(state.get("asked", ())) if isinstance(state, Mapping) else set()
        self._latest = -1

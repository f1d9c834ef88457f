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

    Rules judge a step on another thread, and training does not wait for them. For each step after
    which they want a full one, one more of those that are decided from then on is; as the next step
    is decided before they hear of the one that ends, it is the second after that, or a later one.

    Args:
        due: The steps that are due in any case.
    """

    def __init__(self, due: Schedule) -> None:
        self._due = due
        self._named: set[int] = set()
        # Each has one thread that counts.
        self._wanted = self._given = 0
        self._resumed_at: int | None = None

    def __call__(self, step: int) -> bool:
        """Whether the step is measured in full; asked on the training thread, in their order."""
        named = {other for other in tuple(self._named) if other <= step}
        self._named -= named
        wanted = self._wanted > self._given and step != self._resumed_at
        self._given += wanted
        return self._due(step) or bool(named) or wanted

    def ask(self, step: int) -> None:
        """Have this step measured in full, or the next one if it is decided already."""
        self._named.add(step)

    def want(self) -> None:
        """The rules want a full measurement after the step that they judged, on their thread."""
        self._wanted += 1

    def state_dict(self) -> dict[str, Any]:
        """What is known of later steps, in numbers and lists."""
        return {"asked": sorted(self._named), "wanted": self._wanted - self._given}

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
        self._resumed_at = step

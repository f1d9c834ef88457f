"""The order of what a rank sends: each step has a place, also where a run goes back."""

from __future__ import annotations

_LAP = 2**44
"""Twice the steps that a run may have."""


class Places:
    """Numbers what one rank sends. Ranks that train together give a step the same number."""

    def __init__(self) -> None:
        self._lap, self._last = 0, (-1, "")

    def next(self, step: int, phase: str) -> int:
        """The place of a step, or of a phase before it; never lower than the one before.

        A run that goes back to an earlier step, or repeats a phase, begins another lap.
        """
        place = 2 * step + (not phase)
        self._lap += place < self._last[0] or (place, phase) == self._last
        self._last = place, phase
        return self._lap * _LAP + place


def step_of(place: int) -> int:
    """The step that has this place."""
    return place % _LAP // 2

"""Reports a fault when it begins, grows worse and ends, rather than at every step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from telemetry.alert import Alert

CALM_STEPS = 20
"""Steps without a finding after which a fault is over, for rules with no number of their own: two
full measurements of every ten steps; by eye."""


class Episode:
    """Turns what a rule finds, step by step, into alerts.

    Args:
        calm: Number of calls in a row without a finding after which the fault is over.
    """

    _looks_without: int = 0
    _current: Alert | None = None

    def __init__(self, calm: int) -> None:
        self._calm = calm

    @property
    def is_on(self) -> bool:
        """Whether a fault has begun and not ended."""
        return self._current is not None

    @property
    def module_name(self) -> str | None:
        """The module that the fault's alert has named; None if it is not on."""
        return self._current.module_name if self._current is not None else None

    def update(self, step: int, found: Alert | None) -> Iterator[Alert]:
        """Add what a rule found at a step; None if it looked and found nothing."""
        begun = self._current
        if found is not None:
            self._looks_without = 0
            if begun is None:
                self._current = found
                yield found
            elif (begun.severity, found.severity) == ("warning", "error"):
                self._current = found
                yield replace(found, stage="worse")
        elif begun is not None:
            self._looks_without += 1
            if self._looks_without >= self._calm:
                self._current = None
                yield _ended(begun, step)


def _ended(begun: Alert, step: int) -> Alert:
    return replace(
        begun,
        severity="note" if begun.severity == "note" else "warning",
        step=step,
        stage="end",
        message=f"Over: {begun.kind.replace('_', ' ')}{begun.where}, begun at step {begun.step}.",
        consequences=(),
    )

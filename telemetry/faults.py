"""Faults of our own: told once, never raised into the training loop."""

from __future__ import annotations

import logging

log = logging.getLogger("telemetry")


class Faults:
    """Counts what went wrong inside telemetry and tells the first time of each kind."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def report(self, doing: str) -> None:
        """Note the exception being handled; ``doing`` says what could not be done."""
        self._counts[doing] = self._counts.get(doing, 0) + 1
        if self._counts[doing] == 1:
            log.warning("telemetry failed %s; training goes on without it", doing, exc_info=True)

    def summary(self) -> str:
        """What failed and how often, or an empty string."""
        return ", ".join(f"{doing} ({count}×)" for doing, count in self._counts.items())

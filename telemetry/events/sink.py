"""What takes the values that a run writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Sink(Protocol):
    """Where values go: a file that another thread writes, so that no alert waits for the disk."""

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        /,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[bytes] = (),
    ) -> None:
        """Add one event of these values, as ``FileWriter.write_values`` does."""

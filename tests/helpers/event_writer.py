"""Writer of raw events for tests and benchmarks."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from telemetry.events.files import EventFile, session_start
from telemetry.events.summaries import event_of


class EventWriter:
    """Event file of ours in a directory; each event is in it when the call returns."""

    def __init__(self, log_dir: Path | str) -> None:
        self._file = EventFile(str(log_dir))
        self._file.append(deque())

    def write_values(
        self, values: Sequence[bytes], step: int = 0, wall_time: float | None = None
    ) -> None:
        """Write one event; its time is now, if none is given."""
        self.write(event_of(values, step, time.time() if wall_time is None else wall_time))

    def purge(self, step: int) -> None:
        """Make readers drop this step and later ones of earlier files."""
        self.write(session_start(step))

    def write(self, event: bytes) -> None:
        self._file.append(deque([event]))

    def close(self) -> None:
        self._file.close()

"""Writers for processes of which several train together: one that waits, and one that is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary


class NoWriter:
    """Of a process for which another one writes.

    Args:
        log_dir: Where that one does.
    """

    def __init__(self, log_dir: str) -> None:
        self._log_dir = log_dir

    def get_logdir(self) -> str:
        return self._log_dir

    def write_values(self, *values: Any, **how: Any) -> None:
        """Writes nothing."""

    def flush(self, timeout_s: float = 0.0) -> bool:
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """There is nothing to close."""


class LateWriter(NoWriter):
    """Keeps values until it is known which process writes.

    Args:
        log_dir: As above.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self._waiting: list[Callable[[Any], None]] = []
        self._writer: Any = None

    def write_values(self, values: Sequence[Summary.Value], *where: Any, **how: Any) -> None:
        """Write them, or keep them until :meth:`use`."""
        self._write(lambda writer: writer.write_values(values, *where, **how))

    def _write(self, write: Callable[[Any], None]) -> None:
        if self._writer is None:
            self._waiting.append(write)
        else:
            write(self._writer)

    def use(self, writer: Any) -> None:
        """From now on, this one writes."""
        for write in self._waiting:
            write(writer)
        self._waiting, self._writer = [], writer

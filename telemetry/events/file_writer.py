"""Writer of the event files of one log directory, in the background."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing.util import Finalize
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events.background import PATIENCE_S, BackgroundWriter, Files
from telemetry.events.local_files import LocalFiles
from telemetry.events.summaries import event_of

_logger = logging.getLogger(__name__)

_MAX_REPEATED_BYTES = 4 << 20


class FileWriter(BackgroundWriter[bytes]):
    """Writer of events to a new file in a log directory, or at a URL that fsspec understands.

    Adding an event never blocks on the disk and never fails because of it. After a failed write,
    events stay in memory and the write is retried every ``flush_s``; lost events are counted. An
    event is in the file within ``flush_s``, even if the process is killed then. An interpreter that
    exits without ``close()`` writes the rest.

    In a forked child, and as an unpickled or deep copy, a writer is inert: it writes nothing and
    logs that once. The original writer is not affected.

    A path with a NUL character or an unknown protocol raises ValueError.
    """

    _process_id = -1  # of a copy: no process has this id
    _reported_inert = False

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        flush_s: float = 1.0,
        filename_suffix: str = "",
        max_pending_bytes: int = 64 << 20,
    ) -> None:
        self._log_dir = os.fspath(log_dir)
        if b"\0" in os.fsencode(self._log_dir):
            raise ValueError(f"FileWriter({self._log_dir!r}): a path cannot hold a NUL character")
        self._repeated = _Repeated()
        super().__init__(
            _files_in(self._log_dir, filename_suffix, self._repeated),
            name=self._log_dir,
            flush_s=flush_s,
            max_pending_bytes=max_pending_bytes,
        )
        self._start()  # which creates the file
        # Unlike atexit, this also runs at the end of a process that multiprocessing forked.
        self._at_exit = Finalize(None, super().close, exitpriority=0)

    def get_logdir(self) -> str:
        return self._log_dir

    def add_event(
        self, event: Event, step: int | None = None, walltime: float | None = None
    ) -> None:
        """Add a copy of an event; ``walltime`` is now if omitted. OSError: the writer is closed."""
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        self.put(event.SerializeToString(), droppable=False, flush=False)

    def write_values(
        self,
        values: Sequence[bytes],
        step: int | None = None,
        walltime: float | None = None,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[bytes] = (),
    ) -> None:
        """Add one event with many values, which costs far less than one event for each.

        Args:
            values: Values from :mod:`telemetry.events.summaries`.
            step: 0 if omitted.
            walltime: Seconds since the epoch; now if omitted.
            droppable: Whether to drop the event when the queue is full: true for measurements.
            flush: Whether to write at once; the call still does not block.
            repeat: Values that readers need in every file. Each later file, such as one after the
                directory was removed, begins with the latest of each tag, with its step and time.
        """
        walltime = time.time() if walltime is None else walltime
        for value in repeat if self.is_here else ():
            (tag,) = (one.tag for one in Summary.FromString(value).value)
            self._repeated.add(tag, event_of([value], step, walltime))
        self.put(event_of(values, step, walltime), droppable=droppable, flush=flush)

    def purge(self, step: int) -> None:
        """Make TensorBoard hide the values logged up to now for this step and later ones."""
        self.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def _put_elsewhere(self) -> None:
        if not self._reported_inert:
            self._reported_inert = True
            _logger.warning(
                "%s: this writer is a copy in another process or of another writer, and writes "
                "nothing; open one here to write from here",
                self._log_dir,
            )

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Write the queued events within the timeout, and log the number of lost ones."""
        if self.is_here:
            super().close(timeout_s)
            self._at_exit.cancel()

    def __getstate__(self) -> dict[str, Any]:
        return {"_log_dir": self._log_dir}


def _files_in(log_dir: str, filename_suffix: str, repeated: Iterable[bytes]) -> Files[bytes]:
    if "://" not in log_dir:
        return LocalFiles(log_dir, filename_suffix, repeated=repeated)
    from telemetry.events.remote_files import RemoteFiles  # fsspec is optional

    return RemoteFiles(log_dir, filename_suffix, repeated=repeated)


class _Repeated:
    """Latest event of each tag; above 4 MiB the largest older ones are dropped.

    One thread may add events while another iterates.
    """

    def __init__(self) -> None:
        self._events: Mapping[str, bytes] = {}  # replaced, never modified

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._events.values())

    def add(self, tag: str, event: bytes) -> None:
        kept = {known: older for known, older in self._events.items() if known != tag}
        while kept and sum(map(len, kept.values())) + len(event) > _MAX_REPEATED_BYTES:
            del kept[max(kept, key=lambda known: len(kept[known]))]
        self._events = {**kept, tag: event}

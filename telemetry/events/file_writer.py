"""Writes events to the event files of one log directory, in the background."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from multiprocessing.util import Finalize
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog, TaggedRunMetadata
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events.background import PATIENCE_S, BackgroundWriter, Files
from telemetry.events.local_files import LocalFiles
from telemetry.events.repeated import Repeated
from telemetry.events.room import tags_of
from telemetry.events.summaries import event_of

_logger = logging.getLogger(__name__)


class FileWriter:
    """Writes events to a new file in a log directory, with the methods of torch's ``FileWriter``.

    Adding an event never waits for the disk and never fails because of it: an event that cannot be
    written stays in memory, is tried again every ``flush_s``, and is counted if it is lost. An
    event is in the file within ``flush_s``, even if the process is killed then. An interpreter that
    exits without ``close()`` writes the rest.

    In a forked child, and as an unpickled or deep copy, a writer is inert: it logs that once and
    writes nothing. The original goes on writing.

    Args:
        log_dir: The run's directory, created if it is missing; or a URL that fsspec understands.
        flush_s: The longest time in seconds that an event waits before it is written.
        filename_suffix: Appended to the file's name.
        max_pending_bytes: Droppable events are dropped when this many bytes wait to be written.

    Raises:
        ValueError: The path holds a NUL character, or the URL's protocol is unknown.
    """

    # Of a copy, which has its directory alone.
    _background: BackgroundWriter[bytes] | None = None
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
        self._repeated = Repeated()
        self._background = BackgroundWriter(
            _files_in(self._log_dir, filename_suffix, self._repeated),
            name=self._log_dir,
            flush_s=flush_s,
            max_pending_bytes=max_pending_bytes,
        )
        # Unlike atexit, this also runs at the end of a process that multiprocessing forked.
        self._at_exit = Finalize(None, self._background.close, exitpriority=0)

    def get_logdir(self) -> str:
        return self._log_dir

    @property
    def is_inert(self) -> bool:
        """Whether this is a copy, which writes nothing."""
        return self._background is None or not self._background.is_here

    @property
    def dropped_count(self) -> int:
        """Droppable events that were dropped because the queue was full."""
        return self._background.dropped_count if self._background else 0

    @property
    def lost_count(self) -> int:
        """Other events that were lost; final after ``close()``."""
        return self._background.lost_count if self._background else 0

    @property
    def failure(self) -> Exception | None:
        """What stopped the latest attempt to write; None if it succeeded."""
        return self._background.failure if self._background else None

    def add_event(
        self,
        event: Event,
        step: int | None = None,
        walltime: float | None = None,
        *,
        droppable: bool = False,
        flush: bool = False,
    ) -> None:
        """Adds an event.

        Args:
            event: The event; it is copied.
            step: Overrides the event's step if given.
            walltime: Seconds since the epoch; now if omitted.
            droppable: Whether to drop and count this event when the queue is full: for
                measurements, not for values that the user asked to keep.
            flush: Whether to write at once, without waiting for it.

        Raises:
            OSError: The writer is closed.
        """
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        self._put(event.SerializeToString(), droppable=droppable, flush=flush)

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
        """Adds one event with many values, which costs far less than one event for each.

        Args:
            values: As :mod:`telemetry.events.summaries` builds them.
            step: 0 if omitted.
            walltime: As in :meth:`add_event`.
            droppable: As in :meth:`add_event`.
            flush: As in :meth:`add_event`.
            repeat: Those of the values that readers need in every file to understand the others.
                Each later file, such as one after the directory was removed, begins with the
                latest value of each such tag, with its step and time.
        """
        walltime = time.time() if walltime is None else walltime
        if repeat and not self.is_inert:
            for value in repeat:
                alone = event_of([value], step, walltime)
                (tag,) = tags_of(alone)
                self._repeated.add(tag, alone)
        self._put(event_of(values, step, walltime), droppable=droppable, flush=flush)

    def add_summary(
        self, summary: Summary, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        """Adds an event with this summary."""
        self.add_event(Event(summary=summary), global_step, walltime)

    def purge(self, step: int) -> None:
        """Makes TensorBoard hide what was logged so far for this step and later ones."""
        self.add_event(Event(session_log=SessionLog(status=SessionLog.START)), step)

    def add_graph(self, graph_profile: tuple[Any, Any], walltime: float | None = None) -> None:
        """Adds a ``GraphDef`` and the ``RunMetadata`` of one step."""
        graph, run_metadata = graph_profile
        self.add_onnx_graph(graph, walltime)
        tagged = TaggedRunMetadata(tag="step1", run_metadata=run_metadata.SerializeToString())
        self.add_event(Event(tagged_run_metadata=tagged), None, walltime)

    def add_onnx_graph(self, graph: Any, walltime: float | None = None) -> None:
        """Adds a ``GraphDef``."""
        self.add_event(Event(graph_def=graph.SerializeToString()), None, walltime)

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Waits until all events so far are in the file, or writing them has failed.

        Returns:
            False if the disk has not answered within the time.
        """
        return self._background is None or self._background.flush(timeout_s)

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Writes what waits, in at most this time, and logs how many events were lost, if any.

        If the disk has not answered by then, the rest counts as lost.
        """
        if self._background is not None and self._background.is_here:
            self._background.close(timeout_s)
            self._at_exit.cancel()

    def _put(self, event: bytes, *, droppable: bool, flush: bool) -> None:
        if self._background is not None and self._background.is_here:
            self._background.put(event, droppable=droppable, flush=flush)
        elif not self._reported_inert:
            self._reported_inert = True
            _logger.warning(
                "%s: this writer is a copy in another process or of another writer, and writes "
                "nothing; open one here to write from here",
                self._log_dir,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {"_log_dir": self._log_dir}


def _files_in(log_dir: str, filename_suffix: str, repeated: Iterable[bytes]) -> Files[bytes]:
    if "://" not in log_dir:
        return LocalFiles(log_dir, filename_suffix, repeated=repeated)
    from telemetry.events.remote_files import RemoteFiles  # fsspec is optional

    return RemoteFiles(log_dir, filename_suffix, repeated=repeated)

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

_logger = logging.getLogger(__name__)


class FileWriter:
    """Writes events to a new file in a log directory; does what torch's ``FileWriter`` does.

    Adding an event never waits for the disk and never fails because of it: what cannot be
    written is kept in memory, tried again every ``flush_s``, and counted if it has to be given
    up. What is added is in the file within ``flush_s``, also if the process is killed then; an
    interpreter that exits without ``close()`` writes the rest.

    In a forked child, and as an unpickled or deep copy, a writer is inert: it says so once and
    writes nothing. A file has one writer, and that one goes on.

    Args:
        log_dir: The run's directory, made if it is missing; or a URL that fsspec understands.
        flush_s: The longest time in seconds that an event waits before it is written.
        filename_suffix: Appended to the file's name.
        max_pending_bytes: Droppable events are dropped when so many bytes wait to be written.

    Raises:
        ValueError: The directory's name is none, or the URL's protocol is unknown.
    """

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
        self._background: BackgroundWriter[bytes] | None = BackgroundWriter(
            _files_in(self._log_dir, filename_suffix, self._repeated),
            name=self._log_dir,
            flush_s=flush_s,
            max_pending_bytes=max_pending_bytes,
        )
        self._process_id = os.getpid()
        self._told_inert = False
        # Unlike atexit, this also runs at the end of a process that multiprocessing forked.
        self._at_exit = Finalize(None, self._background.close, exitpriority=0)

    def get_logdir(self) -> str:
        return self._log_dir

    @property
    def is_inert(self) -> bool:
        """Whether this is a copy, which writes nothing."""
        return self._background_here() is None

    @property
    def dropped_count(self) -> int:
        """Droppable events that were dropped because too many waited."""
        return self._background.dropped_count if self._background else 0

    @property
    def lost_count(self) -> int:
        """Other events that were given up; complete after ``close()``."""
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
            event: What to write; a copy is taken.
            step: Overrides the event's step if given.
            walltime: Seconds since the epoch; now if omitted.
            droppable: Drop this event, and count it, when too many are waiting. For what a
                program measures; not for what its user asked to keep.
            flush: Write at once, and do not wait for it.

        Raises:
            OSError: The writer is closed.
        """
        event.wall_time = time.time() if walltime is None else walltime
        if step is not None:
            event.step = int(step)
        self._put(event, droppable, flush)

    def write_values(
        self,
        values: Sequence[Summary.Value],
        step: int | None = None,
        walltime: float | None = None,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[Summary.Value] = (),
    ) -> None:
        """Adds one event with many values, which costs far less than one event for each.

        Args:
            values: What to write.
            step: 0 if omitted.
            walltime: As in :meth:`add_event`, like the following two.
            droppable: For measurements.
            flush: Write at once.
            repeat: Those of the values that every file must hold so that readers understand the
                others. The latest of each tag is written again, with its step and time, wherever
                a later file is begun, as after the directory was removed.
        """
        event = Event(
            wall_time=time.time() if walltime is None else walltime,
            step=0 if step is None else int(step),
        )
        for value in repeat:
            event.summary.value.append(value)
            self._repeated.add(value.tag, event.SerializeToString())
            event.ClearField("summary")
        event.summary.value.extend(values)
        self._put(event, droppable, flush)

    def add_summary(
        self, summary: Summary, global_step: int | None = None, walltime: float | None = None
    ) -> None:
        """Adds an event with this summary."""
        self.add_event(Event(summary=summary), global_step, walltime)

    def purge(self, step: int) -> None:
        """Hides in TensorBoard what was logged so far for this step and later ones."""
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
        """Waits until all events so far are in the file, or could not be written.

        Returns:
            Whether that was so within the time; if not, the disk has not answered.
        """
        background = self._background_here()
        return background is None or background.flush(timeout_s)

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Writes what waits, within this time in all, and logs how many events were lost, if any.

        If the disk has not answered by then, what is left counts as lost.
        """
        if background := self._background_here():
            background.close(timeout_s)
            self._at_exit.cancel()

    def _put(self, event: Event, droppable: bool, flush: bool) -> None:
        if background := self._background_here():
            background.put(event.SerializeToString(), droppable=droppable, flush=flush)
        elif not self._told_inert:
            self._told_inert = True
            _logger.warning(
                "%s: this writer is a copy in another process or of another writer, and writes "
                "nothing; open one here to write from here",
                self._log_dir,
            )

    def _background_here(self) -> BackgroundWriter[bytes] | None:
        return self._background if os.getpid() == self._process_id else None

    def __getstate__(self) -> dict[str, Any]:
        return {"_log_dir": self._log_dir}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._log_dir = state["_log_dir"]
        self._repeated = Repeated()
        self._background = None
        self._process_id = -1  # of none
        self._told_inert = False


def _files_in(log_dir: str, filename_suffix: str, repeated: Iterable[bytes]) -> Files[bytes]:
    if "://" not in log_dir:
        return LocalFiles(log_dir, filename_suffix, repeated=repeated)
    from telemetry.events.remote_files import RemoteFiles  # fsspec is optional

    return RemoteFiles(log_dir, filename_suffix, repeated=repeated)

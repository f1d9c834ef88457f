"""Drop-in replacement of torch's ``SummaryWriter``: the same methods, a different file writer.

:class:`GivenWriter` writes through a writer that its user continues to use.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from torch.utils import tensorboard
from torch.utils.tensorboard import summary

from telemetry.events.background import PATIENCE_S, BackgroundWriter, each_within
from telemetry.events.file_writer import FileWriter
from telemetry.events.summaries import event_of

_logger = logging.getLogger(__name__)


class _File(FileWriter, tensorboard.FileWriter):  # type: ignore[misc]  # says whether it flushed
    """File writer of ours with torch's methods; events added during a close go to its successor."""

    successor: Callable[[], FileWriter] | None = None

    def put(self, item: bytes, *, droppable: bool, flush: bool) -> None:
        try:
            super().put(item, droppable=droppable, flush=flush)
        except OSError:
            if self.successor is None or (successor := self.successor()) is self:
                raise
            successor.put(item, droppable=droppable, flush=flush)


class SummaryWriter(tensorboard.SummaryWriter):
    """Writes to TensorBoard like ``torch.utils.tensorboard.SummaryWriter``, and never fails.

    Every ``add_*`` method takes the same arguments and writes the same tags. Adding does not block
    and raises only for wrong arguments. A full disk, a removed directory or an unreachable store
    does not disturb the training loop: see ``FileWriter``. Values added after ``close()`` are
    written to another new file, as with torch.

    In a forked child, and as an unpickled or deep copy, a writer writes nothing and logs that
    once. A process must open its own writer.

    Args:
        log_dir: Directory of the run, or a URL that fsspec understands such as
            ``s3://bucket/run``. ``runs/<date>_<host><comment>`` if omitted.
        comment: Suffix of the default ``log_dir``.
        purge_step: Step at which a run resumes: TensorBoard hides earlier values of this step and
            later ones.
        max_queue: Accepted but unused: the queue is bounded in bytes, and adding never blocks.
        flush_secs: Longest time in seconds that an event stays queued.
        filename_suffix: Suffix of the name of every event file.

    Raises:
        OSError: The directory or the first file cannot be created.
        ValueError: The path holds a NUL character, or the URL's protocol is unknown.
    """

    # In torch they are annotated as None only.
    file_writer: _File | None  # type: ignore[assignment]
    all_writers: dict[str, _File] | None  # type: ignore[assignment]
    _opening: AbstractContextManager[object] = nullcontext()  # of a copy, which writes nothing

    def __init__(
        self,
        log_dir: str | os.PathLike[str] | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: float = 1.0,
        filename_suffix: str = "",
    ) -> None:
        self._opening = threading.RLock()
        super().__init__(log_dir, comment, purge_step, max_queue, flush_secs, filename_suffix)
        # A directory that cannot be written must raise before the training, not after it.
        file_writer = self._get_file_writer()
        file_writer.flush()
        if isinstance(failure := file_writer.failure, OSError):
            self.close()
            raise failure

    def _get_file_writer(self) -> _File:
        if (file_writer := self.file_writer) is not None:  # until another thread closes it
            return file_writer
        with self._opening:
            if (file_writer := self.file_writer) is None:
                file_writer = self._open(self.log_dir)
                file_writer.successor = self._get_file_writer
                self.all_writers = {file_writer.get_logdir(): file_writer}
                if self.purge_step is not None:
                    step, self.purge_step = self.purge_step, None
                    file_writer.purge(step)
                self.file_writer = file_writer
        return file_writer

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_opening"}

    def _open(self, log_dir: str | os.PathLike[str]) -> _File:
        return _File(log_dir, flush_s=self.flush_secs, filename_suffix=self.filename_suffix)

    def _open_below(self, run_dir: str) -> _File:
        own = self._get_file_writer()
        return self._open(run_dir) if own.is_here else own

    def flush(self) -> None:
        """Block until all added values are in the files, at most 30 s."""
        each_within(PATIENCE_S, *(w.flush for w in (self.all_writers or {}).values()))

    def close(self) -> None:
        """Write the queued events within 30 s, and log lost ones. Later calls open a new file."""
        if self.file_writer is None or self.all_writers is None or not self.file_writer.is_here:
            return
        writers = self.all_writers
        # First, so that other threads write to a new file while this blocks on the disk.
        self.file_writer = self.all_writers = None
        each_within(PATIENCE_S, *(writer.close for writer in writers.values()))

    def add_scalars(
        self,
        main_tag: str,
        tag_scalar_dict: Mapping[str, Any],
        global_step: int | None = None,
        walltime: float | None = None,
    ) -> None:
        walltime = time.time() if walltime is None else walltime
        log_dir = self._get_file_writer().get_logdir()
        assert self.all_writers is not None
        for tag, value in tag_scalar_dict.items():
            # One run for each curve, named as torch names it.
            run_dir = f"{log_dir}/{main_tag.replace('/', '_')}_{tag}"
            if run_dir not in self.all_writers:
                self.all_writers[run_dir] = self._open_below(run_dir)
            scalar = summary.scalar(main_tag, value)
            self.all_writers[run_dir].add_summary(scalar, global_step, walltime)

    def add_hparams(
        self,
        hparam_dict: dict[str, Any],
        metric_dict: dict[str, Any],
        hparam_domain_discrete: dict[str, list[Any]] | None = None,
        run_name: str | None = None,
        global_step: int | None = None,
    ) -> None:
        values = [*summary.hparams(hparam_dict, metric_dict, hparam_domain_discrete)]
        values += [summary.scalar(tag, value) for tag, value in metric_dict.items()]
        log_dir = self._get_file_writer().get_logdir()
        file_writer = self._open_below(os.path.join(log_dir, run_name or str(time.time())))
        for value in values:
            file_writer.add_summary(value, global_step)
        file_writer.close()


_REPLACED = ("flush", "close")


class GivenWriter:
    """Adds events to the file of a writer, torch's or ours, that its user continues to use.

    Frameworks flush and close their writer before the logger is closed. Queued values are written
    first: until :meth:`close`, these two methods are replaced, and call ``before``, with True for a
    close. Torch's writer blocks its callers on the disk, so a background thread passes events on.
    """

    def __init__(self, writer: tensorboard.SummaryWriter, before: Callable[[bool], None]) -> None:
        self._writer: Any = writer
        self._before = before
        self.is_closed = False
        self._background: BackgroundWriter[bytes] | None = None  # ours has its own
        if not isinstance(writer, SummaryWriter):
            self._background = BackgroundWriter(_TorchFiles(writer), name=str(writer.log_dir))
        for name in _REPLACED:
            setattr(writer, name, _AfterUs(self, writer, name))

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        walltime: float,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[bytes] = (),
    ) -> None:
        """Add one event; see ``FileWriter``. Torch's writer repeats nothing."""
        if self._background is not None:
            event = event_of(values, step, walltime)
            self._background.put(event, droppable=droppable, flush=flush)
        else:
            how = {"droppable": droppable, "flush": flush, "repeat": repeat}
            self._writer._get_file_writer().write_values(values, step, walltime, **how)

    def hand_on(self, *, closing: bool) -> None:
        """Write queued values before the writer is flushed or closed."""
        if self.is_closed:
            return
        try:
            self._before(closing)
            if self._background is not None:
                self._background.flush()
        except Exception:
            _logger.exception("%s: queued values could not be written", self._writer.log_dir)

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Block until all events are written or have failed; return False on a timeout."""
        waiting = self._background or self._writer.file_writer
        return waiting is None or bool(waiting.flush(timeout_s))

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Flush the writer, restore its methods, and log the number of lost events."""
        self.is_closed = True
        for name in _REPLACED:
            _AfterUs.remove(self._writer, name)
        if self._background is not None:
            self._background.close(timeout_s)
        else:
            self.flush(timeout_s)


class _AfterUs:
    """Replacement of a method of one writer, which first writes the queued values."""

    def __init__(self, given: GivenWriter, writer: object, name: str) -> None:
        self._given = given
        self._writer, self._name = writer, name
        self._method = getattr(writer, name)
        self._is_of_class = name not in vars(writer)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self._given.hand_on(closing=self._name == "close")
        return self._method(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Looked up before a copy of the writer has attributes: it gets its class's method.
        return getattr, (self._writer, self._name)

    @staticmethod
    def remove(writer: object, name: str) -> None:
        """Restore the method where the outermost replacements belong to closed loggers."""
        while isinstance(top := vars(writer).get(name), _AfterUs) and top._given.is_closed:
            if top._is_of_class:
                vars(writer).pop(name, None)
            else:
                setattr(writer, name, top._method)


class _TorchFiles:
    """File of torch's writer or, while that is closed, another one.

    Only its user reopens the writer: two threads could open two files, and one would lose its end.
    """

    def __init__(self, writer: tensorboard.SummaryWriter) -> None:
        self._writer: Any = writer
        self._own: Any = None

    def write(self, events: deque[bytes], *, urgent: bool) -> None:
        writer = self._writer
        if (theirs := writer.file_writer) is not None:
            with suppress(OSError):  # it has been closed just now, or its disk has failed
                _hand_over(events, theirs, urgent)
                self.close()
                return
        if self._own is None and events:
            options = writer.max_queue, writer.flush_secs, writer.filename_suffix
            self._own = tensorboard.FileWriter(writer.log_dir, *options)
        if self._own is not None:
            _hand_over(events, self._own, urgent)

    def close(self) -> None:
        own, self._own = self._own, None
        if own is not None:
            own.close()


def _hand_over(events: deque[bytes], file_writer: Any, urgent: bool) -> None:
    for data in events:
        event = Event.FromString(data)
        file_writer.add_event(event, None, event.wall_time)
    if urgent:
        file_writer.flush()
    events.clear()

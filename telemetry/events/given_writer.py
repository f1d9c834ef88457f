"""Writer through a user's ``SummaryWriter``, which others may flush, close and reopen."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from torch.utils import tensorboard

from telemetry.events.background import PATIENCE_S, BackgroundWriter
from telemetry.events.summaries import event_of
from telemetry.events.summary_writer import SummaryWriter

_logger = logging.getLogger(__name__)

_REPLACED = ("flush", "close")


class GivenWriter:
    """Adds events to the file of a writer that its user continues to use.

    Frameworks flush and close their writer when the training ends, before the logger is closed.
    Queued values are written first: until :meth:`close`, these two methods of that writer are
    replaced. Values added after a close are written to a new file.

    Torch's writer blocks its callers on the disk, so a background thread passes events to it.

    Args:
        writer: Torch's or ours, open or closed. It is left open.
        before: Called before the writer is flushed or, with True, closed.
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
            self._writer._write_values(values, step, walltime, **how)

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

"""Writes through a user's ``SummaryWriter``, which others may flush, close and reopen meanwhile."""

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
    """Adds to the file of a writer that its user goes on using.

    Frameworks flush and close their writer when the training ends, before the logger is closed.
    Whoever does so, what waits here is written first: until :meth:`close`, these two methods of
    that one writer are replaced. What comes after a close goes to a new file.

    Torch's writer makes its callers wait for the disk, so a thread of our own hands events to it.

    Args:
        writer: Torch's or ours, open or closed. It is left open.
        before: Called before someone flushes or, if it is told True, closes the writer.
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
        """As ``FileWriter`` does; torch's writer repeats nothing."""
        if self._background is not None:
            event = event_of(values, step, walltime)
            self._background.put(event, droppable=droppable, flush=flush)
        else:
            how = {"droppable": droppable, "flush": flush, "repeat": repeat}
            self._writer._write_values(values, step, walltime, **how)

    def hand_on(self, *, closing: bool) -> None:
        """Have what waits written: someone flushes or closes the writer."""
        if self.is_closed:
            return
        try:
            self._before(closing)
            if self._background is not None:
                self._background.flush()
        except Exception:
            _logger.exception("%s: what waited could not be written", self._writer.log_dir)

    def flush(self, timeout_s: float = PATIENCE_S) -> bool:
        """Wait until all events so far are in the file, or have failed; False if that is late."""
        waiting = self._background or self._writer.file_writer
        return waiting is None or bool(waiting.flush(timeout_s))

    def close(self, timeout_s: float = PATIENCE_S) -> None:
        """Flush the writer, leave it to its user, and log how many events were lost, if any."""
        self.is_closed = True
        for name in _REPLACED:
            _AfterUs.remove(self._writer, name)
        if self._background is not None:
            self._background.close(timeout_s)
        else:
            self.flush(timeout_s)


class _AfterUs:
    """Stands in for a method of one writer: what waits here is written before that is called."""

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
        """Take those of closed loggers away; one that others stand in for only calls its method."""
        while isinstance(top := vars(writer).get(name), _AfterUs) and top._given.is_closed:
            if top._is_of_class:
                vars(writer).pop(name, None)
            else:
                setattr(writer, name, top._method)


class _TorchFiles:
    """The file of torch's writer or, while that is closed, one of our own.

    Only its user opens the writer again: two threads could open two files, of which the writer
    knows one, and the other would lack its end.
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

"""Writes through a user's ``SummaryWriter``, which others may flush, close and reopen meanwhile."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from torch.utils import tensorboard

from telemetry.events.background import BackgroundWriter
from telemetry.events.file_writer import FileWriter
from telemetry.events.summaries import event_of

_logger = logging.getLogger(__name__)

_FLUSH_S = 1.0
_MAX_PENDING_BYTES = 64 << 20


class GivenWriter:
    """Adds to the file of a writer that its user goes on using, like :class:`FileWriter`.

    Frameworks flush and close their writer when the training ends, before the logger is closed.
    Whoever does so, what waits here is written first. The next event reopens a closed writer, as
    the writer's own methods do, and goes to a new file.

    Torch's writer makes its callers wait for the disk, so a thread of our own hands events to it.
    Until then they are as safe as with ``FileWriter``.

    Args:
        writer: Torch's or ours, open or closed. It is left open.
    """

    def __init__(self, writer: tensorboard.SummaryWriter) -> None:
        self._writer: Any = writer
        self._process_id = os.getpid()
        self._before_flush: Callable[[], None] = lambda: None
        self._background: BackgroundWriter[bytes] | None = None  # ours has its own
        self._calls = _Calls.begin(writer, self._drain)
        if not isinstance(self._writer._get_file_writer(), FileWriter):
            self._background = BackgroundWriter(
                _TorchFiles(self._calls),
                name=self.get_logdir(),
                flush_s=_FLUSH_S,
                max_pending_bytes=_MAX_PENDING_BYTES,
            )

    def get_logdir(self) -> str:
        return str(self._writer.log_dir)

    def call_before_flush(self, function: Callable[[], None]) -> None:
        """Calls ``function`` each time before someone flushes or closes the writer."""
        self._before_flush = function

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
        """Adds one event with many values; never waits for the disk.

        Arguments are as for ``FileWriter``; torch's writer ignores ``repeat``.
        """
        if self._background is not None:
            event = event_of(values, step, walltime)
            self._background.put(event, droppable=droppable, flush=flush)
            return
        self._with_ours(
            lambda file_writer: file_writer.write_values(
                values, step, walltime, droppable=droppable, flush=flush, repeat=repeat
            )
        )

    def _with_ours(self, write: Callable[[FileWriter], None]) -> None:
        """Write with the file writer that our own writer has at the moment."""
        while True:
            file_writer = self._writer._get_file_writer()
            try:
                write(file_writer)
                return
            except OSError:  # closed; if that was just now, there will be another file writer
                if self._writer.file_writer is file_writer:
                    raise

    @property
    def is_open(self) -> bool:
        """Whether the writer has a file, so that one more event opens no other."""
        return self._writer.file_writer is not None

    @property
    def is_about_to_close(self) -> bool:
        """Whether what is called before a flush is called because someone closes the writer."""
        return self._calls.is_about_to_close

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Waits until all events so far are in the file, or writing them has failed.

        Returns:
            False if that took longer than ``timeout_s``.
        """
        if os.getpid() != self._process_id:
            return True
        if self._background is not None:
            return self._background.flush(timeout_s)
        file_writer = self._writer.file_writer
        return file_writer is None or bool(file_writer.flush(timeout_s))

    def close(self, timeout_s: float = 30.0) -> None:
        """Flushes the writer, leaves it to its user, and logs how many events were lost, if any."""
        if os.getpid() != self._process_id:
            return
        self._calls.end(self._drain)
        if self._background is not None:
            self._background.close(timeout_s)
        else:
            self.flush(timeout_s)

    def _drain(self) -> None:
        self._before_flush()
        if self._background is not None:
            self._background.flush()


class _TorchFiles:
    """Hands events to torch's writer."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls

    def write(self, events: deque[bytes], *, urgent: bool) -> None:
        """Writes the events, unless another thread opens or closes the writer just now.

        Raises:
            OSError: Torch's writer could not write.
        """
        file_writer = None
        try:
            while events:
                file_writer = self._calls.file_writer()
                if file_writer is None:
                    return
                event = Event.FromString(events[0])
                file_writer.add_event(event, None, event.wall_time)
                events.popleft()
            if urgent and (file_writer := self._calls.writer.file_writer):
                file_writer.flush()
        except OSError:
            if not self._calls.is_closing and self._calls.writer.file_writer is file_writer:
                raise

    def close(self) -> None: ...


class _Calls:
    """Replaces methods of a writer as long as any logger writes through it.

    The replacements are attributes of that one writer, so they see a call before it is made.
    """

    _NAMES = ("flush", "close", "_get_file_writer")
    _registry = threading.RLock()

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self._process_id = os.getpid()
        self._drains: list[Callable[[], None]] = []
        self.is_about_to_close = False
        self._closing: list[None] = []  # an entry per call; a count would need a lock
        # Two threads that find the writer closed must not open two files.
        self._opening = threading.RLock()
        self._methods = {name: getattr(writer, name) for name in self._NAMES}
        self._attributes = {
            name: vars(writer)[name] for name in self._NAMES if name in vars(writer)
        }
        for name in self._NAMES:
            setattr(writer, name, _Call(self, name))

    @classmethod
    def begin(cls, writer: Any, drain: Callable[[], None]) -> _Calls:
        """Call ``drain`` before the writer is flushed or closed, in this process."""
        with cls._registry:
            calls = getattr(vars(writer).get("close"), "calls", None)
            if not isinstance(calls, cls) or calls._process_id != os.getpid():
                calls = cls(writer)
            calls._drains.append(drain)
            return calls

    def end(self, drain: Callable[[], None]) -> None:
        """Stop calling ``drain``. The last call of this restores the writer's methods."""
        with self._registry:
            if drain not in self._drains:
                return
            self._drains.remove(drain)
            if self._drains:
                return
            for name in self._NAMES:
                if getattr(vars(self.writer).get(name), "calls", None) is not self:
                    continue  # someone else has replaced it since, and calls us
                if name in self._attributes:
                    setattr(self.writer, name, self._attributes[name])
                else:
                    delattr(self.writer, name)

    @property
    def is_closing(self) -> bool:
        """Whether someone is closing the writer."""
        return bool(self._closing)

    def file_writer(self) -> Any:
        """The file writer, opened if necessary; None while another thread opens it.

        Waiting for that thread could deadlock: its signal handler may wait for this one.
        """
        if not self._opening.acquire(blocking=False):
            return None
        try:
            return self.writer._get_file_writer()
        finally:
            self._opening.release()

    # --- what is called in place of the writer's methods -----------------------------------------

    def flush(self, *args: Any, **options: Any) -> Any:
        self._drain()
        return self._methods["flush"](*args, **options)

    def close(self, *args: Any, **options: Any) -> Any:
        self.is_about_to_close = True
        self._drain()
        self.is_about_to_close = False
        self._closing.append(None)
        try:
            return self._methods["close"](*args, **options)
        finally:
            self._closing.pop()

    def _get_file_writer(self) -> Any:
        if self.writer.file_writer is not None or os.getpid() != self._process_id:
            return self._methods["_get_file_writer"]()
        with self._opening:
            return self._methods["_get_file_writer"]()

    def _drain(self) -> None:
        if os.getpid() != self._process_id:
            return
        for drain in tuple(self._drains):
            try:
                drain()
            except Exception:
                _logger.exception("%s: what waited could not be written", self.writer.log_dir)


class _Call:
    """A replaced method of a writer; a copy of the writer has its class's method again."""

    def __init__(self, calls: _Calls, name: str) -> None:
        self.calls = calls
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        return getattr(self.calls, self._name)(*args, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        # Looked up before the copy has attributes of its own.
        return getattr, (self.calls.writer, self._name)

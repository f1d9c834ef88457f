"""Event file of a ``SummaryWriter`` that the user gives, and goes on to use."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

from telemetry.events.files import EventFile

log = logging.getLogger("telemetry")


class GivenFile:
    """File of a user's writer, of which nothing is changed.

    When the user has closed the writer, or its disk has failed, a file of ours continues in the
    same directory. Torch's writer takes back nothing then: what it has accepted may be lost.
    """

    def __init__(self, writer: SummaryWriter) -> None:
        self._writer = writer
        self._directory = str(writer.log_dir)
        self._own = EventFile(self._directory)
        self._own.continues = True
        self._is_theirs = True

    def repeat(self, key: str, event: bytes) -> None:
        """Begin our file with this event; torch's writer repeats nothing."""
        self._own.repeat(key, event)

    def append(self, items: deque[bytes]) -> None:
        """Write events, and remove each that the writer has accepted."""
        while items and self._is_theirs:
            try:
                if (theirs := self._writer.file_writer) is None:
                    raise OSError("it is closed")
                event = Event.FromString(items[0])
                theirs.add_event(event, None, event.wall_time)
                items.popleft()
            except OSError as error:
                if "://" in self._directory:
                    raise
                log.log(
                    logging.INFO if error.errno is None else logging.WARNING,  # closed, or failed
                    "telemetry: %s: the given SummaryWriter takes no more events (%s); a new file "
                    "in its directory continues",
                    self._directory,
                    error,
                )
                self._is_theirs = False
        if items:
            self._own.append(items)

    def flush(self) -> None:
        if self._is_theirs and (theirs := self._writer.file_writer) is not None:
            with suppress(OSError):  # the next event finds out
                theirs.flush()

    def close(self) -> None:
        self._own.close()

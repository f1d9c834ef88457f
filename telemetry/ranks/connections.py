"""Messages between ranks over TCP, on one event loop: an inbox takes them, an uplink sends them.

Each is its length in eight bytes, and then itself. Up go the password of the run, then messages,
one at a time. Down come news, and for each message nothing, its acknowledgement: what has none is
sent again elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import socket
import time
from asyncio import Event, StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import distributed

from telemetry.ranks.meeting import Address, Meeting, in_thread

# Of one message, and of all that wait to be sent.
MAX_MESSAGE_BYTES = 2**30
MAX_BYTES = 64 * 2**20

_READ_BYTES = 2**20
_CONNECT_S = 2.0
_SEARCH_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "big") + data


async def _read(stream: StreamReader) -> bytes:
    """EOFError: the other side is gone; ValueError: it sends something else."""
    size = int.from_bytes(await stream.readexactly(8), "big")
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return await stream.readexactly(size)


async def is_set_within(seconds: float, event: Event) -> bool:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


class Inbox:
    """The receiving side: gives each message that arrives to ``take``, and posts news.

    Messages stay in the other side's memory and the system's while this loop is busy.
    """

    def __init__(self, password: str, take: Callable[[bytes], None], news: bytes) -> None:
        self._password = password.encode()
        self._take = take
        self._news = news
        self._children: set[StreamWriter] = set()

    async def open(self, listening: socket.socket) -> None:
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=_READ_BYTES)

    def close(self) -> None:
        """Have the ranks below send elsewhere."""
        self._server.close()
        for child in self._children:
            child.close()

    async def _serve(self, stream: StreamReader, child: StreamWriter) -> None:
        try:
            if await _read(stream) == self._password:
                self._children.add(child)
                child.write(_framed(self._news))
                while True:
                    self._take(await _read(stream))
                    child.write(_framed(b""))
        except (OSError, EOFError, ValueError, asyncio.CancelledError):
            pass  # it sends what is missing elsewhere
        finally:
            self._children.discard(child)
            child.close()

    def post(self, news: bytes) -> None:
        """To the ranks below, and to those that come later."""
        self._news = news
        for child in self._children:
            child.write(_framed(news))


class Uplink:
    """The sending side: finds whom to send to, and goes elsewhere if need be.

    If the rank above is silent for ``patience_s``, or has ended, this rank turns to the first rank
    of all. Nobody replaces that one: if it is stopped, it is waited for; if it is gone, it is tried
    again, ever more seldom.
    """

    def __init__(self, meeting: Meeting, patience_s: float, hear: Callable[[bytes], None]) -> None:
        self._meeting = meeting
        self._patience_s = patience_s
        self._hear = hear
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._bytes = 0
        self._is_sent = False  # the first that waits, for its acknowledgement
        self._sent_at = math.inf
        self._finishing = Event()
        self._address: Address | None = None
        self._above: StreamWriter | None = None
        self._has_met = False
        self._pause_s = 0.0

    def put(self, data: bytes, *, droppable: bool) -> None:
        """Send a message, or keep it until it can be sent; of too many records the oldest go."""
        self._waiting.append((data, droppable))
        self._bytes += len(data)
        index = int(self._is_sent)
        while self._bytes > MAX_BYTES and index < len(self._waiting) - 1:
            if self._waiting[index][1]:
                self._bytes -= len(self._waiting[index][0])
                del self._waiting[index]
            else:
                index += 1
        self._send_next()

    def look(self, now: float) -> None:
        """Now and then: give up a rank that is silent for too long and is not the first."""
        self._sent_at = min(self._sent_at, now) if self._is_sent else math.inf
        hangs = now - self._sent_at > self._patience_s
        if hangs and self._above is not None and self._address != self._meeting.first:
            self._above.transport.abort()

    def finish(self) -> None:
        """Have :meth:`run` end when all is sent."""
        self._finishing.set()
        if self._is_done and self._above is not None:
            self._above.close()

    async def run(self) -> None:
        """Meet the rank above, and talk to it until all is sent."""
        while (address := await self._look_for()) is not None:
            self._address = address
            with suppress(OSError, EOFError, ValueError, asyncio.TimeoutError):
                await self._talk(address)
                return
            if address != self._meeting.first:
                continue
            if not self._has_met:
                self._meeting.first = None  # nobody is there: that is what a former run has left
            self._pause_s = min(2 * self._pause_s + 0.5, _LONGEST_PAUSE_S)
            if await is_set_within(self._pause_s, self._finishing):
                return

    async def _look_for(self) -> Address | None:
        """Where to send, as soon as that is known; asks ever more seldom.

        A run may end before its ranks have met, so at the end it goes on for some seconds.
        """
        pause_s, give_up = _FIRST_PAUSE_S, math.inf
        while not self._is_done and time.monotonic() < give_up:
            with suppress(RuntimeError, OSError, ValueError):
                if (address := await in_thread(self._meeting.find)) is not None:
                    return address
            if not await is_set_within(pause_s, self._finishing):
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            elif distributed.is_initialized():
                give_up = min(give_up, time.monotonic() + _SEARCH_S)
                await asyncio.sleep(_FIRST_PAUSE_S)
            else:
                break
        return None

    async def _talk(self, address: Address) -> None:
        """Send what there is and will be; returns when all is sent."""
        stream, self._above = await _connected(address)
        try:
            self._above.write(_framed(self._meeting.password.encode()))
            self._send_next()
            while not self._is_done:
                data = await _read(stream)
                self._has_met = True
                self._sent_at, self._pause_s = math.inf, 0.0
                if data:
                    self._hear(data)
                elif self._is_sent:
                    self._bytes -= len(self._waiting.popleft()[0])
                    self._is_sent = False
                    self._send_next()
        finally:
            self._above.close()
            self._above, self._is_sent = None, False

    def _send_next(self) -> None:
        if self._above is not None and self._waiting and not self._is_sent:
            self._is_sent = True
            self._above.write(_framed(self._waiting[0][0]))

    @property
    def _is_done(self) -> bool:
        return self._finishing.is_set() and not self._waiting


async def _connected(address: Address) -> tuple[StreamReader, StreamWriter]:
    """Under which of its names it answers; OSError: under none."""
    for host in address.reachable:
        with suppress(OSError, asyncio.TimeoutError):
            connecting = asyncio.open_connection(host, address.port, limit=_READ_BYTES)
            return await asyncio.wait_for(connecting, _CONNECT_S)
    raise ConnectionError(f"nobody answers at {address}")

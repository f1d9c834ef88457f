"""A rank's way up: finds whom to send to, sends, and goes elsewhere if need be."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import islice

from torch import distributed

from telemetry.ranks.meeting import Search, delete_keys
from telemetry.ranks.stores import (
    Address,
    Peer,
    Reply,
    exchange,
    join,
    leave,
    open_client,
    reach,
    sever,
)

# How many messages, and how large ones, may wait on the other side, which holds them in memory. One
# may, however large it is.
MAX_BYTES = 64 * 2**20
MAX_SENT = 64
MAX_SENT_BYTES = 8 * 2**20

# How long the threads have at the end; a store that is being opened takes the longest.
LAST_S = 4.0

POLL_S = 0.25
_BUSY_S = 0.02
_SEVER_S = 0.2
_SEARCH_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0


class Outbox:
    """What is yet to be sent, and what was sent and nobody has taken so far; used by two threads.

    If more than ``max_bytes`` wait, the oldest records are left out; notices never are. Everybody
    new is sent ``greeting`` first: who is here.
    """

    def __init__(self, greeting: bytes, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._bytes = 0
        self._taken = self._sent = 0  # Of this connection; _taken is the number of the oldest.
        self._greeting = greeting

    def put(self, data: bytes, *, droppable: bool) -> None:
        with self._lock:
            self._waiting.append((data, droppable))
            self._bytes += len(data)
            while self._bytes > self._max_bytes and self._drop_one():
                pass

    def connect(self) -> None:
        """Begin with somebody new, who gets all that nobody has taken."""
        with self._lock:
            self._taken = self._sent = 0
            self._waiting.appendleft((self._greeting, False))
            self._bytes += len(self._greeting)

    def to_send(self) -> tuple[int, list[bytes]]:
        """What may be sent now, and the number of the first of it on this connection."""
        with self._lock:
            first, size = self._sent, 0
            messages: list[bytes] = []
            for index, (data, _) in enumerate(islice(self._waiting, MAX_SENT)):
                size += len(data)
                if size > MAX_SENT_BYTES and index > 0:
                    break
                if index >= first - self._taken:
                    messages.append(data)
            self._sent += len(messages)
            return first, messages

    def take(self, count: int) -> None:
        """The other side has taken so many messages of this connection."""
        with self._lock:
            for _ in range(count - self._taken):
                self._bytes -= len(self._waiting.popleft()[0])
            self._taken = count

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def _drop_one(self) -> bool:
        """Leave out the oldest record that has not been sent; returns whether there was one."""
        for index in range(self._sent - self._taken, len(self._waiting) - 1):
            data, droppable = self._waiting[index]
            if droppable:
                del self._waiting[index]
                self._bytes -= len(data)
                return True
        return False


class _Sender(threading.Thread):
    """Sends what is in the outbox to one other rank, until told to stop. Its calls may hang."""

    def __init__(self, outbox: Outbox, search: Search, pause_s: float) -> None:
        super().__init__(name="telemetry-send", daemon=True)
        self._outbox = outbox
        self._search = search
        self._pause_s = pause_s
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._abandoned = False
        self._peer: Peer | None = None
        self.reply: Reply | None = None  # the latest of the other side
        self.address: Address | None = None  # where it sends, as soon as that is known
        self.start()

    def run(self) -> None:
        # What a store raises are RuntimeErrors; addresses, OSErrors; old or foreign keys, others.
        with suppress(RuntimeError, OSError, ValueError):
            if not self._stopping.wait(self._pause_s):
                self._send_all()

    def hurry(self) -> None:
        """There is something to send."""
        self._wake.set()

    def stop(self) -> None:
        """End when all is sent."""
        self._stopping.set()
        self._wake.set()

    def abandon(self) -> None:
        """Send nothing more, and end as soon as the other side answers."""
        self._abandoned = True
        self.stop()

    def end(self, timeout_s: float) -> None:
        """Wait for the end, and have a call that hangs fail."""
        give_up = time.monotonic() + timeout_s
        self.join(min(timeout_s, _SEVER_S))
        while self.is_alive() and self._peer is not None and time.monotonic() < give_up:
            sever(self._peer)
            self.join(_SEVER_S)

    def _send_all(self) -> None:
        self.address = self._look_for()
        if self.address is None:
            return
        self._peer = reach(self.address)
        store = open_client(self._peer)
        child = join(store)
        if not self._abandoned:
            self._outbox.connect()
        while not self._abandoned:
            stopping = self._stopping.is_set()
            first, messages = self._outbox.to_send()
            reply = exchange(store, child, first, messages)
            if self._abandoned:
                break
            self._outbox.take(reply.taken)
            self.reply = reply
            if reply.leaves or (stopping and self._outbox.is_empty):
                break
            self._wake.wait(POLL_S if self._outbox.is_empty else _BUSY_S)
            self._wake.clear()
        leave(store)

    def _look_for(self) -> Address | None:
        """Where to send, as soon as that is known; asks ever more seldom.

        A run may end before its ranks have met, so at the end it goes on for some seconds.
        """
        pause_s, give_up = _FIRST_PAUSE_S, math.inf
        while (address := self._search.find()) is None:
            if not self._stopping.wait(pause_s):
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
                continue
            give_up = min(give_up, time.monotonic() + _SEARCH_S)
            is_over = time.monotonic() > give_up or not distributed.is_initialized()
            if is_over or self._abandoned or self._outbox.is_empty:
                return None
            time.sleep(_FIRST_PAUSE_S)
        return address


class Uplink:
    """Sends messages to the rank above. Nothing here waits; :meth:`look` is called now and then.

    If the rank above does not answer for some seconds, has died, or says that it leaves, this rank
    turns to the first rank of all and repeats what may be lost. Nobody replaces that one: if it is
    stopped, it is waited for; if it is gone, it is looked for again; if it leaves, that is the end.

    ``patience_s``: how long to wait for an answer of a rank that is not the first.
    """

    def __init__(self, search: Search, greeting: bytes, patience_s: float) -> None:
        self._search = search
        self._outbox = Outbox(greeting)
        self._patience_s = patience_s
        self._news = b""
        self._pause_s = 0.0
        self._sender = _Sender(self._outbox, search, 0.0)
        self._abandoned: list[_Sender] = []
        self._reply: Reply | None = None
        self._answered_at = 0.0
        self.ended = False  # the first rank has left

    def put(self, data: bytes, *, droppable: bool) -> None:
        """Send a message, or keep it until it can be sent; of too many records the oldest go."""
        if not self.ended:
            self._outbox.put(data, droppable=droppable)
            self._sender.hurry()

    def look(self, now: float) -> bytes:
        """Go elsewhere if need be; returns the latest news, empty if there are none."""
        sender = self._sender
        reply = sender.reply
        if reply is not self._reply or sender.address is None:
            self._reply, self._answered_at = reply, now
        if reply is not None:
            self._news, self._pause_s = reply.news, 0.0
        hangs = now - self._answered_at > self._patience_s and not self._is_at_first
        if not self.ended and (hangs or not sender.is_alive()):
            self._go_elsewhere()
        return self._news

    def close(self, timeout_s: float) -> None:
        """Send what waits, within a time limit, and end."""
        give_up = time.monotonic() + timeout_s
        self._sender.stop()
        while self._sender.is_alive() and time.monotonic() < give_up:
            self._sender.join(_SEVER_S)
        self.ended = True
        for sender in [self._sender, *self._abandoned]:
            sender.abandon()
            sender.end(LAST_S)
        delete_keys(self._search.keys)

    @property
    def _is_at_first(self) -> bool:
        return self._sender.address is not None and self._sender.address == self._search.first

    def _go_elsewhere(self) -> None:
        reply = self._sender.reply
        if reply is not None and reply.leaves and self._is_at_first:
            self.ended = True
            return
        self._sender.abandon()
        self._abandoned = [s for s in [*self._abandoned, self._sender] if s.is_alive()]
        if self._is_at_first and not self._news:
            self._search.first = None  # nobody is there: that is what a former run has left
        elif self._search.first is not None:
            self._search.only_first = True
        self._sender = _Sender(self._outbox, self._search, self._pause_s)
        self._pause_s = min(2 * self._pause_s + 0.5, _LONGEST_PAUSE_S)

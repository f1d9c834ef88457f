"""A rank's way up: finds whom to send to, sends, and goes elsewhere if need be."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from contextlib import suppress
from itertools import islice

from torch import distributed

from telemetry.ranks.meeting import Address, Meeting
from telemetry.ranks.stores import Peer, exchange, join, leave, open_client, reach, sever

# How many messages, and how large ones, may wait on the other side, which holds them in memory. One
# may, however large it is.
MAX_BYTES = 64 * 2**20
MAX_SENT = 64
MAX_SENT_BYTES = 8 * 2**20

# How long the thread has at the end; a store that is being opened takes the longest.
LAST_S = 4.0

POLL_S = 0.25
_BUSY_S = 0.02
_SEVER_S = 0.2
_SEARCH_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0


class Outbox:
    """What is yet to be sent, and what was sent and nobody has taken so far; used by two threads.

    If more than ``max_bytes`` wait, the oldest records are left out; notices never are.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._bytes = 0
        self._taken = self._sent = 0  # Of this connection; _taken is the number of the oldest.

    def put(self, data: bytes, *, droppable: bool) -> None:
        with self._lock:
            self._waiting.append((data, droppable))
            self._bytes += len(data)
            index = self._sent - self._taken
            while self._bytes > self._max_bytes and index < len(self._waiting) - 1:
                if self._waiting[index][1]:
                    self._bytes -= len(self._waiting[index][0])
                    del self._waiting[index]
                else:
                    index += 1

    def connect(self) -> None:
        """Begin with somebody new, who gets all that nobody has taken."""
        with self._lock:
            self._taken = self._sent = 0

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


class Uplink(threading.Thread):
    """Sends messages to the rank above. Nothing but its own thread waits, whose calls may hang.

    If the rank above is silent for some seconds, has died or leaves, this rank turns to the first
    rank of all and repeats what may be lost. Nobody replaces that one: if it is stopped, it is
    waited for; if it is gone, it is looked for again; if it leaves, that is the end.

    Args:
        patience_s: How long to wait for an answer of a rank that is not the first.

    Attributes:
        news: The latest of the rank above, empty if there are none.
        tried: Whether it has reached that rank, or has failed to.
    """

    def __init__(self, meeting: Meeting, patience_s: float) -> None:
        super().__init__(name="telemetry-send", daemon=True)
        self._meeting = meeting
        self._outbox = Outbox()
        self._patience_s = patience_s
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._abandoned = False
        self._address: Address | None = None
        self._peer: Peer | None = None
        self._answers = self._seen = 0  # each has one thread that counts
        self._answered_at = math.inf
        self.news = b""
        self.tried = False
        self.start()

    def put(self, data: bytes, *, droppable: bool) -> None:
        """Send a message, or keep it until it can be sent; of too many records the oldest go."""
        if self.is_alive():
            self._outbox.put(data, droppable=droppable)
            self._wake.set()

    def look(self, now: float) -> None:
        """Now and then: have a call fail that waits too long for a rank that is not the first."""
        if self._peer is None or self._answers != self._seen or self._answered_at > now:
            self._answered_at, self._seen = now, self._answers
        peer, hangs = self._peer, now - self._answered_at > self._patience_s
        if hangs and peer is not None and self._address != self._meeting.first:
            sever(peer)

    def close(self, timeout_s: float) -> None:
        """Send what waits, within a time limit, and end."""
        self._stopping.set()
        self._wake.set()
        self.join(max(timeout_s, 0.0))
        self._abandoned = True
        give_up = time.monotonic() + LAST_S
        while self.is_alive() and time.monotonic() < give_up:
            self.join(_SEVER_S)
            if self.is_alive() and self._peer is not None:
                sever(self._peer)
        self._meeting.close()

    # --- on its own thread -----------------------------------------------------------------------

    def run(self) -> None:
        pause_s, has_met = 0.0, False
        while self._has_more() and (address := self._look_for()) is not None:
            self._address, answers = address, self._answers
            # What a store raises are RuntimeErrors; addresses, OSErrors; foreign keys, others.
            with suppress(RuntimeError, OSError, ValueError):
                self._send_all(address)
                if address == self._meeting.first:
                    return
            self._peer = None
            self.tried = True
            if address != self._meeting.first:
                continue
            if self._answers != answers:
                has_met, pause_s = True, 0.0
            elif not has_met:
                self._meeting.first = None  # nobody is there: that is what a former run has left
            pause_s = min(2 * pause_s + 0.5, _LONGEST_PAUSE_S)
            if self._stopping.wait(pause_s):
                return

    def _has_more(self) -> bool:
        return not self._abandoned and not (self._stopping.is_set() and self._outbox.is_empty)

    def _look_for(self) -> Address | None:
        """Where to send, as soon as that is known; asks ever more seldom.

        A run may end before its ranks have met, so at the end it goes on for some seconds.
        """
        pause_s, give_up = _FIRST_PAUSE_S, math.inf
        while self._has_more():
            with suppress(RuntimeError, OSError, ValueError):
                if (address := self._meeting.find()) is not None:
                    return address
            if not self._stopping.wait(pause_s):
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
                continue
            give_up = min(give_up, time.monotonic() + _SEARCH_S)
            if time.monotonic() > give_up or not distributed.is_initialized():
                return None
            time.sleep(_FIRST_PAUSE_S)
        return None

    def _send_all(self, address: Address) -> None:
        """Send what there is and will be; returns when all is sent, or the other side leaves."""
        self._peer = reach(address.reachable, address.port)
        store = open_client(self._peer)
        child = join(store)
        self._outbox.connect()
        while not self._abandoned:
            first, messages = self._outbox.to_send()
            reply = exchange(store, child, first, messages)
            self._outbox.take(reply.taken)
            self.news, self._answers, self.tried = reply.news, self._answers + 1, True
            if reply.leaves or not self._has_more():
                break
            self._wake.wait(POLL_S if self._outbox.is_empty else _BUSY_S)
            self._wake.clear()
        leave(store)

"""What a rank has yet to send, and what it has sent that nobody has taken so far."""

from __future__ import annotations

import threading
from collections import deque
from itertools import islice

MAX_BYTES = 64 * 2**20
MAX_SENT = 64
MAX_SENT_BYTES = 8 * 2**20
"""How many parts, and how large ones, may wait on the other side, which holds them in memory. One
may, however large it is."""


class Outbox:
    """Keeps parts until the other side has taken them; used by two threads.

    Args:
        max_bytes: How much waits before the oldest records are left out. Notices never are.

    Attributes:
        greeting: What everybody new is sent first: who is here.
        dropped: How many records were left out.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._waiting: deque[tuple[bytes, bool]] = deque()
        self._bytes = 0
        self._taken = self._sent = 0  # Of this connection; _taken is the number of the oldest.
        self.greeting = b""
        self.dropped = 0

    def put(self, data: bytes, *, droppable: bool) -> None:
        """Add a part, at the end."""
        with self._lock:
            self._waiting.append((data, droppable))
            self._bytes += len(data)
            while self._bytes > self._max_bytes and self._drop_one():
                pass

    def connect(self) -> None:
        """Begin with somebody new, who gets all that nobody has taken."""
        with self._lock:
            self._taken = self._sent = 0
            self._waiting.appendleft((self.greeting, False))
            self._bytes += len(self.greeting)

    def to_send(self) -> tuple[int, list[bytes]]:
        """What may be sent now, and the number of the first of it on this connection."""
        with self._lock:
            first, size = self._sent, 0
            parts: list[bytes] = []
            for index, (data, _) in enumerate(islice(self._waiting, MAX_SENT)):
                size += len(data)
                if size > MAX_SENT_BYTES and index > 0:
                    break
                if index >= first - self._taken:
                    parts.append(data)
            self._sent += len(parts)
            return first, parts

    def take(self, count: int) -> None:
        """The other side has taken so many parts of this connection."""
        with self._lock:
            for _ in range(count - self._taken):
                self._bytes -= len(self._waiting.popleft()[0])
            self._taken = count

    @property
    def is_empty(self) -> bool:
        """Whether everything has been taken."""
        return not self._waiting

    def _drop_one(self) -> bool:
        """Leave out the oldest record that has not been sent; returns whether there was one."""
        for index in range(self._sent - self._taken, len(self._waiting) - 1):
            data, droppable = self._waiting[index]
            if droppable:
                del self._waiting[index]
                self._bytes -= len(data)
                self.dropped += 1
                return True
        return False

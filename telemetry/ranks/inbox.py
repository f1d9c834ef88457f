"""A rank's own store, to which the ranks below it send.

Keys on it: ``children`` and ``gone`` count the connections that were opened and given up.
Connection ``n`` sends its parts as ``n/0``, ``n/1``, ... and then rings ``bell``, another counter.
``n/taken`` says how many of them have been taken (and deleted), so that a child knows how many wait
and what it has to send again elsewhere. ``news`` is what the ranks below are to know; its first
byte says whether this rank is about to leave.

The server takes no value of more than 8 MiB and closes the connection of who sends one. A larger
part is sent in pieces, ``n/0/0``, ``n/0/1``, ..., and then ``n/0`` says how many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from telemetry.ranks.address import open_server

PIECE_BYTES = 4 * 2**20

_STAYS, _LEAVES = b"+", b"-"
_WHOLE, _PIECES = b"=", b"#"


class Inbox:
    """The receiving side: opens a server and reads what arrives. Its calls take microseconds."""

    def __init__(self) -> None:
        self.store: TCPStore = open_server()
        self._rung = 0
        self._taken: list[int] = []
        self._news = b""
        self.post(b"")

    def collect(self) -> list[bytes]:
        """What has arrived since the last call, in the order in which each child sent it."""
        rung = self.store.add("bell", 0)
        if rung == self._rung:
            return []
        self._rung = rung
        count = self.store.add("children", 0)
        self._taken += [0] * (count - len(self._taken))
        return [data for child in range(count) for data in self._collect_from(child)]

    def post(self, news: bytes) -> None:
        self._news = news
        _set(self.store, "news", _STAYS + news)

    def dismiss(self) -> None:
        """Have the ranks below send elsewhere."""
        _set(self.store, "news", _LEAVES + self._news)

    @property
    def children(self) -> int:
        """How many connections are in use, as far as they have said."""
        return self.store.add("children", 0) - self.store.add("gone", 0)

    def _collect_from(self, child: int) -> list[bytes]:
        found = []
        while self.store.check([key := f"{child}/{self._taken[child]}"]):
            data = self._take(key)
            if data[:1] == _PIECES:
                pieces = [self._take(f"{key}/{piece}") for piece in range(int(data[1:]))]
                data = b"".join([_WHOLE, *pieces])
            found.append(data[1:])
            self._taken[child] += 1
        if found:
            self.store.set(f"{child}/taken", str(self._taken[child]))
        return found

    def _take(self, key: str) -> bytes:
        data = bytes(self.store.get(key))
        self.store.delete_key(key)
        return data


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the other side says: how many parts it has taken so far, and what it has posted."""

    taken: int
    leaves: bool
    news: bytes


def join(store: Store) -> int:
    """Open a connection to an inbox; its number."""
    child = store.add("children", 1) - 1
    store.set(f"{child}/taken", "0")
    return child


def exchange(store: Store, child: int, first: int, parts: Sequence[bytes]) -> Reply:
    """Send parts, of which the first has this number, and hear what is new: one round trip."""
    for number, part in enumerate(parts, start=first):
        _send(store, f"{child}/{number}", part)
    if parts:
        store.add("bell", 1)
    taken, news = store.multi_get([f"{child}/taken", "news"])
    return Reply(taken=int(taken), leaves=news[:1] == _LEAVES, news=bytes(news[1:]))


def leave(store: Store) -> None:
    store.add("gone", 1)


def _send(store: Store, key: str, part: bytes) -> None:
    if len(part) < PIECE_BYTES:
        _set(store, key, _WHOLE + part)
        return
    pieces = range(0, len(part), PIECE_BYTES)
    for piece, begin in enumerate(pieces):
        _set(store, f"{key}/{piece}", part[begin : begin + PIECE_BYTES])
    _set(store, key, _PIECES + str(len(pieces)).encode())


def _set(store: Store, key: str, data: bytes) -> None:
    store.set(key, data)  # type: ignore[arg-type]  # bytes are taken, too

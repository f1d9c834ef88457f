"""The stores through which ranks send: servers, their addresses, and what is written there.

Keys on a rank's own store: ``children`` and ``gone`` count the connections that were opened and
given up. Connection ``n`` sends its messages as ``n/0``, ``n/1``, ... and then rings ``bell``,
another counter. ``n/taken`` says how many were taken, and deleted: what is to be sent again
elsewhere. ``news`` is for the ranks below; its first byte says whether this rank is about to leave.

The server takes no value of more than 8 MiB and closes the connection of who sends one. A larger
message is sent in pieces, ``n/0/0``, ``n/0/1``, ..., and then ``n/0`` says how many there are.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

CONNECT_S = 2.0
PIECE_BYTES = 4 * 2**20

_NO_LIMIT = timedelta(days=1)
_STAYS, _LEAVES = b"+", b"-"
_WHOLE, _PIECES = b"=", b"#"

Peer = tuple[str, int]
"""Host and port of a server that has answered."""


def open_server() -> TCPStore:
    """A store with a server on a free port; its thread is the library's own, without the GIL."""
    return TCPStore(
        "localhost", 0, is_master=True, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
    )


def reach(hosts: Iterable[str], port: int) -> Peer:
    """Finds under which of its names a server answers; OSError: under none."""
    reason = OSError("an address without hosts")
    for host in hosts:
        try:
            # The store would itself repeat this for seconds and print each failure.
            with socket.create_connection((host, port), CONNECT_S) as probe:
                return _plain(probe.getpeername())
        except OSError as error:
            reason = error
    raise reason


def open_client(peer: Peer) -> TCPStore:
    """A connection to a server. Its calls wait without limit for one whose process is stopped."""
    host, port = peer
    store = TCPStore(
        host, port, is_master=False, timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
    )
    store.set_timeout(_NO_LIMIT)  # a stopped server may come back
    return store


def sever(peer: Peer) -> None:
    """Shut down this process's connections to a server, so that calls in progress fail.

    A thread that stayed in such a call would abort the process if the answer came while the
    interpreter shuts down (CPython before 3.14). A store tells nobody its socket, but the system
    lists those of the process. One that is being opened tries again, so repeat this.
    """
    with suppress(OSError):
        for descriptor in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):
                if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                    continue
                with socket.socket(fileno=os.dup(descriptor)) as connection:
                    name = connection.getpeername()  # of a local one, a string
                    if isinstance(name, tuple) and _plain(name) == peer:
                        connection.shutdown(socket.SHUT_RDWR)


def _plain(name: tuple[Any, ...]) -> Peer:
    """Host and port of a socket's name, IPv4 also where it is written as IPv6."""
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


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


class Reply(NamedTuple):
    """What the other side says: how many messages it has taken so far, and what it has posted."""

    taken: int
    leaves: bool
    news: bytes


def join(store: Store) -> int:
    """Open a connection to an inbox; its number."""
    child = store.add("children", 1) - 1
    store.set(f"{child}/taken", "0")
    return child


def exchange(store: Store, child: int, first: int, messages: Sequence[bytes]) -> Reply:
    """Send messages, of which the first has this number, and hear what is new: one round trip."""
    for number, message in enumerate(messages, start=first):
        _send(store, f"{child}/{number}", message)
    if messages:
        store.add("bell", 1)
    taken, news = store.multi_get([f"{child}/taken", "news"])
    return Reply(taken=int(taken), leaves=news[:1] == _LEAVES, news=bytes(news[1:]))


def leave(store: Store) -> None:
    store.add("gone", 1)


def _send(store: Store, key: str, message: bytes) -> None:
    if len(message) < PIECE_BYTES:
        _set(store, key, _WHOLE + message)
        return
    pieces = range(0, len(message), PIECE_BYTES)
    for piece, begin in enumerate(pieces):
        _set(store, f"{key}/{piece}", message[begin : begin + PIECE_BYTES])
    _set(store, key, _PIECES + str(len(pieces)).encode())


def _set(store: Store, key: str, data: bytes) -> None:
    store.set(key, data)  # type: ignore[arg-type]  # bytes are taken, too

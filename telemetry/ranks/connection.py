"""Authenticated TCP connections between rank 0 and the other ranks: frames over asyncio streams.

Rank 0 publishes its address, the run's token and the last rank that may connect in the store of the
default process group. A call of the store blocks while the server's process is stopped, so callers
use :func:`in_thread`. The store is not kept, because its server ends with the last reference.

A frame is its kind in one byte, its size in four, and its payload. Rank 0 acknowledges each, and
broadcasts announcements. Less than 1 KiB is read of a connection before it is authenticated.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import hmac
import json
import math
import os
import random
import secrets
import signal
import socket
import weakref
from asyncio import Event, StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, NamedTuple, TypeVar

from torch import distributed
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

T = TypeVar("T")

# Kinds of frames. BARRIER has the step at whose end a rank stops; after ENDED it sends nothing.
RECORDS, BARRIER, ENDED, ANNOUNCEMENT, ACKNOWLEDGED = b"R", b"B", b"E", b"A", b"K"
# Received of a rank when it connects; it is not sent.
CONNECTED = b"C"

MAX_FRAME_BYTES = 256 * 2**20
MAX_READ_BYTES = 16 * 2**20  # of frames that rank 0 reads at the same time
MAX_QUEUED_BYTES = 64 * 2**20
_MOST_IN_FLIGHT = 8  # frames; short steps end faster than a frame travels there and back

# Limits of connections that are not authenticated. The oldest one is closed if there are too many.
AUTHENTICATION_S = 5.0
MAX_UNAUTHENTICATED = 64
_FULL_S = 0.25
_NONCE_BYTES = _DIGEST_BYTES = 32
_RANK_BYTES = 4

# Share of the files that a process may open which is left to training.
_FILES_LEFT = 1 / 4

_READ_BYTES = 2**16
_FRAME_S = 60.0
_RETURN_S = 0.1
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0

_LOST = (OSError, EOFError, ValueError, asyncio.TimeoutError)
_jitter = random.SystemRandom()  # not the generator of the user
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
_calls: weakref.WeakSet[Thread] = weakref.WeakSet()  # of the store

_BACKLOG = 1024
_NONE = "none"
_LOOPBACK = "127.0.0.1"
# An address of no host (RFC 5737), which is reached by the default route.
_NO_HOST = "192.0.2.1"

# RuntimeError or ValueError without a process group.
_default_store = distributed.distributed_c10d._get_default_store


class Address(NamedTuple):
    """Address of rank 0, the token with which ranks authenticate, and the last that may connect."""

    host: str
    port: int
    token: str
    last_rank: float = math.inf


class Rendezvous:
    """Publishes or finds rank 0's address; its name is the same for one logger on all ranks."""

    def __init__(self, name: str) -> None:
        # The store outlives an elastic restart.
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.key = f"telemetry/{restart}/{name}"

    def publish(self) -> tuple[socket.socket, Address]:
        """On rank 0: publish the address; return it and its listening socket."""
        store = _default_store()
        host, token = _host_for(store), secrets.token_hex(32)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        # A new descriptor has the lowest free number, so as many files are open.
        last_rank = (1 - _FILES_LEFT) * _most_files() - listening.fileno() - 1
        address = Address(host, listening.getsockname()[1], token, last_rank)
        store.set(self.key, json.dumps(address))
        return listening, address

    def find(self) -> Address | None:
        """Return rank 0's address; None if it is not published."""
        # Unlike get(), this does not wait for the key.
        address = _default_store().compare_set(self.key, _NONE, _NONE).decode()
        return None if address == _NONE else Address(*json.loads(address))


async def in_thread(call: Callable[[], T]) -> T:
    """Return a call's result; unlike ``asyncio.to_thread``, a blocked call delays no exit."""
    result = Future[T]()
    result.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    thread = Thread(target=run, name="telemetry-rendezvous", daemon=True)
    _calls.add(thread)
    thread.start()
    return await asyncio.wrap_future(result)


@atexit.register
def _hold_calls() -> None:
    """Keep blocked calls of the store from returning while the interpreter ends.

    Before Python 3.14, such a return ends the process with SIGABRT (pytorch#38228).
    """
    for thread in list(_calls):
        thread.join(_RETURN_S)
        if thread.is_alive() and hasattr(signal, "pthread_kill"):
            libc = ctypes.CDLL(None)  # a handler of the signal module runs on the main thread
            libc.signal(signal.SIGURG, ctypes.cast(libc.pause, ctypes.c_void_p))
            signal.pthread_kill(thread.ident or 0, signal.SIGURG)


def _host_for(store: Store) -> str:
    """Return the interface that reaches the store's host; loopback if all ranks are on this one."""
    local, world = (os.environ.get(name) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    host = store.host if isinstance(store, TCPStore) else os.environ.get("MASTER_ADDR", "")
    if host in ("", "localhost", "::1") or host.startswith("127.") or (local and local == world):
        return _LOOPBACK
    # /etc/hosts may map this host's own name to loopback, which other hosts cannot reach.
    for target in (host, _NO_HOST):
        with suppress(OSError):  # there is no route to it
            family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                if not (source := str(probe.getsockname()[0])).startswith("127."):
                    return source
    return _LOOPBACK


def _close_in_child() -> None:  # it may outlive its rank
    for one in _sockets:
        one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload


class _Frames:
    """Reads frames; those that are read together have MAX_READ_BYTES, or are a single one."""

    def __init__(self) -> None:
        self._bytes = 0
        self._changed = asyncio.Condition()

    async def read(self, stream: StreamReader) -> tuple[bytes, bytes]:
        """Return kind and payload."""
        head = await stream.readexactly(5)
        if (size := int.from_bytes(head[1:], "big")) > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {size} bytes")
        if size <= _READ_BYTES:
            return head[:1], await stream.readexactly(size)
        async with self._changed:
            await self._changed.wait_for(lambda: self._bytes + size <= max(size, MAX_READ_BYTES))
            self._bytes += size
        try:
            return head[:1], await asyncio.wait_for(stream.readexactly(size), _FRAME_S)
        finally:
            async with self._changed:
                self._bytes -= size
                self._changed.notify_all()


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly ``size`` bytes; no byte more is read."""
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


async def _authenticate(connection: socket.socket, token: str, rank: int) -> int:
    """Return the rank of the other side, after both have proved that they have the token."""
    loop = asyncio.get_running_loop()
    own = rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_NONCE_BYTES)
    await loop.sock_sendall(connection, own)
    other = await _receive(connection, len(own))
    await loop.sock_sendall(connection, hmac.digest(token.encode(), own + other, "sha256"))
    proof = await _receive(connection, _DIGEST_BYTES)
    is_right = hmac.compare_digest(proof, hmac.digest(token.encode(), other + own, "sha256"))
    other_rank = int.from_bytes(other[:_RANK_BYTES], "big")
    if not is_right or (rank == 0) == (other_rank == 0):  # a reflected proof has the same rank
        raise ValueError("the token is wrong")
    return other_rank


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _sockets.add(connection)
    return connection


def _most_files() -> float:
    try:
        import resource
    except ImportError:  # Windows
        return math.inf
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def wait_for(event: Event, seconds: float | None) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


class Server:
    """Rank 0's side of all connections.

    Args:
        receive: Called with kind, payload and rank of each frame; ValueError closes the connection.
        announcement: Payload that each rank receives first; see :meth:`announce`.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        receive: Callable[[bytes, bytes, int], None],
        announcement: bytes,
    ) -> None:
        self._listening, self._token = _prepared(listening), token
        self._receive = receive
        self._announcement = announcement
        self._writers: dict[int, StreamWriter] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unauthenticated: list[Any] = []  # tasks
        self._frames = _Frames()

    async def run(self) -> None:
        """Accept connections until this is cancelled."""
        loop = asyncio.get_running_loop()
        with self._listening:
            while True:
                if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                    await asyncio.sleep(_FULL_S)  # ranks authenticate meanwhile
                if len(self._unauthenticated) >= MAX_UNAUTHENTICATED:
                    self._unauthenticated[0].cancel()
                try:
                    connection, _ = await loop.sock_accept(self._listening)
                except OSError:  # no file descriptor is left, or the other side has closed it
                    await asyncio.sleep(_FIRST_PAUSE_S)
                    continue
                task = loop.create_task(self._serve(connection))
                self._unauthenticated.append(task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    def announce(self, announcement: bytes) -> None:
        """Broadcast to all ranks; ranks that connect later receive it, too."""
        self._announcement = announcement
        for writer in self._writers.values():
            writer.write(frame(ANNOUNCEMENT, announcement))

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(*_LOST):
            try:
                authentication = _authenticate(_prepared(connection), self._token, 0)
                rank = await asyncio.wait_for(authentication, AUTHENTICATION_S)
            finally:
                self._unauthenticated.remove(asyncio.current_task())
            stream, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
            if rank in self._writers:  # that connection is lost
                self._writers[rank].close()
            self._writers[rank] = writer
            try:
                writer.write(frame(ANNOUNCEMENT, self._announcement))
                self._receive(CONNECTED, b"", rank)
                while True:
                    self._receive(*await self._frames.read(stream), rank)
                    writer.write(frame(ACKNOWLEDGED))
            finally:
                if self._writers.get(rank) is writer:
                    del self._writers[rank]
                writer.transport.abort()


class Client:
    """Another rank's connection to rank 0.

    A frame is sent again, on the next connection, until rank 0 acknowledges it. The client waits
    for a rank 0 that is stopped, and reconnects with exponential back-off and jitter.
    """

    def __init__(
        self, rendezvous: Rendezvous, rank: int, on_announcement: Callable[[bytes], None]
    ) -> None:
        self._rendezvous, self._rank = rendezvous, rank
        self._on_announcement = on_announcement
        self._frames: deque[bytes] = deque()  # the first are in flight
        self._bytes = self._in_flight = 0
        self._writer: StreamWriter | None = None  # while connected
        self._finishing = Event()
        self.attempts = 0  # since rank 0 sent anything
        self.is_known = False  # rank 0 sent something
        self._limit = MAX_QUEUED_BYTES

    def put(self, kind: bytes, payload: bytes = b"") -> None:
        """Queue a frame, BARRIER before others; above the limit the oldest records are dropped."""
        data = frame(kind, payload)
        first = max(1, self._in_flight)
        self._frames.insert(first if kind == BARRIER else len(self._frames), data)
        self._bytes += len(data)
        while self._bytes > self._limit and len(self._frames) > first + 2:
            self._bytes -= len(self._frames[first + 1])
            del self._frames[first + 1]
        self._send()

    def finish(self) -> None:
        """Have :meth:`run` return when everything is acknowledged, or rank 0 has exited."""
        self.put(ENDED)
        self._finishing.set()

    async def run(self) -> None:
        """Connect to rank 0 and send, until :meth:`finish`."""
        while True:
            with suppress(RuntimeError, *_LOST):
                if (address := await in_thread(self._rendezvous.find)) is not None:
                    if self._rank <= address.last_rank:
                        await self._exchange(address)
                    else:
                        self._limit = 0  # rank 0 reports it
                    return
            self.attempts += 1
            if not self._finishing.is_set():
                pause_s = min(_FIRST_PAUSE_S * 1.5 ** min(self.attempts, 64), _LONGEST_PAUSE_S)
                await wait_for(self._finishing, _jitter.uniform(0.5, 1) * pause_s)
            elif self.is_known or not distributed.is_initialized():
                return
            else:
                await asyncio.sleep(_FIRST_PAUSE_S)

    async def _exchange(self, address: Address) -> None:
        """Send until everything is acknowledged after :meth:`finish`."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with _prepared(socket.socket(family)) as connection:
            connecting = asyncio.get_running_loop().sock_connect(connection, address[:2])
            await asyncio.wait_for(connecting, AUTHENTICATION_S)
            authentication = _authenticate(connection, address.token, self._rank)
            await asyncio.wait_for(authentication, AUTHENTICATION_S)
            stream, self._writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
            try:
                self._send()
                while self._frames or not self._finishing.is_set():
                    kind, payload = await _Frames().read(stream)
                    self.is_known, self.attempts = True, 0
                    if kind == ANNOUNCEMENT:
                        self._on_announcement(payload)
                    else:
                        self._bytes -= len(self._frames.popleft())
                        self._in_flight -= 1
                        self._send()
            finally:
                self._writer.transport.abort()
                self._writer, self._in_flight = None, 0

    def _send(self) -> None:
        while self._writer and self._in_flight < min(_MOST_IN_FLIGHT, len(self._frames)):
            self._writer.write(self._frames[self._in_flight])
            self._in_flight += 1

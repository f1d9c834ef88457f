"""Frames between rank 0 and the other ranks: authenticated TCP connections, asyncio streams.

A frame is its kind in one byte, its size in four, and its payload. Ranks send records, one frame at
a time, and their state; rank 0 acknowledges each frame, and sends its announcement. Before a
connection is authenticated, less than 1 KiB of it is read.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import random
import secrets
import socket
import weakref
from asyncio import Event, Semaphore, StreamReader, StreamWriter
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from torch import distributed

from telemetry.ranks.rendezvous import Address, Rendezvous, in_thread

RECORDS, STATE, ANNOUNCEMENT, ACKNOWLEDGED = b"R", b"S", b"A", b"K"

# Of one frame, and of all records that wait to be sent.
MAX_FRAME_BYTES = 256 * 2**20
MAX_QUEUED_BYTES = 64 * 2**20

# Bounds for connections that are not authenticated.
AUTHENTICATION_S = 5.0
MAX_UNAUTHENTICATED = 64
_NONCE_BYTES = _DIGEST_BYTES = 32
_RANK_BYTES = 4

# Share of the files that a process may open which is left to training.
_FILES_LEFT = 1 / 4

_READ_BYTES = 2**16
_LARGE_AT_ONCE = 16
_FRAME_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 30.0
_KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}  # seconds, probes

_LOST = (OSError, EOFError, ValueError, asyncio.TimeoutError)
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A forked child would keep connections open whose process has died."""
    for one in _sockets:
        one.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def frame(kind: bytes, payload: bytes = b"") -> bytes:
    return kind + len(payload).to_bytes(4, "big") + payload


async def _read_frame(stream: StreamReader, slots: Semaphore) -> tuple[bytes, bytes]:
    """Kind and payload; a large one waits for a slot, so that few are in memory at a time.

    EOFError: the connection is closed; ValueError: the frame is too large.
    """
    head = await stream.readexactly(5)
    if (size := int.from_bytes(head[1:], "big")) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {size} bytes")
    if size <= _READ_BYTES:
        return head[:1], await stream.readexactly(size)
    async with slots:
        return head[:1], await asyncio.wait_for(stream.readexactly(size), _FRAME_S)


def _proof(token: str, who: bytes, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"telemetry " + who + b"".join(parts), "sha256")


async def _receive(connection: socket.socket, size: int) -> bytes:
    """Exactly this many bytes; no byte more is read."""
    data = b""
    while len(data) < size:
        more = await asyncio.get_running_loop().sock_recv(connection, size - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _prepared(connection: socket.socket) -> socket.socket:
    connection.setblocking(False)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    _sockets.add(connection)
    return connection


def _most_files() -> float:
    """Number of files that this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return float("inf")
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


async def is_set_within(seconds: float, event: Event) -> bool:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


class Server:
    """Rank 0's end of all connections.

    Args:
        receive: Takes kind, payload and rank of each frame; ValueError: close the connection.
        announcement: Payload that each rank receives first; see :meth:`announce`.

    Attributes:
        refused: Ranks for which there is no file descriptor.
    """

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        receive: Callable[[bytes, bytes, int], None],
        announcement: bytes,
    ) -> None:
        listening.setblocking(False)
        _sockets.add(listening)
        self._listening, self._token = listening, token
        self._receive = receive
        self._announcement = announcement
        self._writers: dict[int, StreamWriter] = {}
        self.refused: set[int] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._slots, self._large = Semaphore(MAX_UNAUTHENTICATED), Semaphore(_LARGE_AT_ONCE)

    async def run(self) -> None:
        """Accept connections until this is cancelled."""
        while True:
            await self._slots.acquire()
            try:
                accepting = asyncio.get_running_loop().sock_accept(self._listening)
                task = asyncio.create_task(self._serve((await accepting)[0]))
            except OSError:  # no file descriptor is left, or the other side is gone
                self._slots.release()
                await asyncio.sleep(_FIRST_PAUSE_S)
                continue
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def announce(self, announcement: bytes) -> None:
        """Send it to all ranks, and to those that connect later."""
        self._announcement = announcement
        for writer in self._writers.values():
            writer.write(frame(ANNOUNCEMENT, announcement))

    def close(self) -> None:
        """Refuse and end all connections."""
        self._listening.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(*_LOST):
            try:
                asking = self._authenticate(_prepared(connection))
                rank = await asyncio.wait_for(asking, AUTHENTICATION_S)
            finally:
                self._slots.release()
            # The lowest free number is given, so as many files are open.
            if connection.fileno() >= (1 - _FILES_LEFT) * _most_files():
                self.refused.add(rank)
                return
            self.refused.discard(rank)
            stream, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
            if rank in self._writers:  # it has lost that connection
                self._writers[rank].close()
            self._writers[rank] = writer
            try:
                writer.write(frame(ANNOUNCEMENT, self._announcement))
                while True:
                    self._receive(*await _read_frame(stream, self._large), rank)
                    writer.write(frame(ACKNOWLEDGED))
            finally:
                if self._writers.get(rank) is writer:
                    del self._writers[rank]
                writer.transport.abort()

    async def _authenticate(self, connection: socket.socket) -> int:
        """The rank at the other side, which has the token; ValueError: it has not."""
        loop, challenge = asyncio.get_running_loop(), secrets.token_bytes(_NONCE_BYTES)
        await loop.sock_sendall(connection, challenge)
        asked = await _receive(connection, _RANK_BYTES + _NONCE_BYTES)
        proof = await _receive(connection, _DIGEST_BYTES)
        if not hmac.compare_digest(proof, _proof(self._token, b"rank", challenge, asked)):
            raise ValueError("the token is wrong")
        await loop.sock_sendall(connection, _proof(self._token, b"zero", challenge, asked))
        return int.from_bytes(asked[:_RANK_BYTES], "big")


class Client:
    """Another rank's end of its connection to rank 0.

    Frames are sent again on the next connection until they are acknowledged, records one at a time
    and in their order. A rank 0 that is stopped is waited for; one that is gone is tried again,
    with exponential back-off and jitter.

    Args:
        receive: Takes each announcement.
    """

    def __init__(self, rendezvous: Rendezvous, rank: int, receive: Callable[[bytes], None]) -> None:
        self._rendezvous, self._rank = rendezvous, rank
        self._receive = receive
        self._records: deque[bytes] = deque()
        self._bytes = 0
        self._state: bytes | None = None
        self._last_state: bytes | None = None
        self._state_is_new = False
        self._wakeup, self._acknowledged, self._finishing = Event(), Event(), Event()
        self._jitter = random.Random()  # not the generator of the user
        self.attempts = 0  # since rank 0 sent anything
        self.has_met = False

    def put(self, records: bytes) -> None:
        """Queue records; above the limit the oldest are dropped, except the one being sent."""
        self._records.append(records)
        self._bytes += len(records)
        while self._bytes > MAX_QUEUED_BYTES and len(self._records) > 2:
            self._bytes -= len(self._records[1])
            del self._records[1]
        self._wakeup.set()

    def set_state(self, state: bytes) -> None:
        """Send this, in the place of the state before."""
        self._state, self._state_is_new = state, True
        self._wakeup.set()

    def finish(self, state: bytes | None = None) -> None:
        """Have :meth:`run` end when all is acknowledged, this state last, or rank 0 is gone."""
        self._last_state = state
        self._finishing.set()
        self._wakeup.set()

    async def run(self, search_s: float) -> None:
        """Connect to rank 0 and send; after :meth:`finish` search it for ``search_s`` at most."""
        loop, give_up = asyncio.get_running_loop(), float("inf")
        while loop.time() < give_up:
            with suppress(RuntimeError, *_LOST):
                if (address := await in_thread(self._rendezvous.find)) is not None:
                    await self._exchange(address)
                    return
            if self._finishing.is_set() and (self.has_met or not distributed.is_initialized()):
                return  # rank 0 is gone, or nobody finds it
            self.attempts += 1
            if self._finishing.is_set():
                give_up = min(give_up, loop.time() + search_s)
                await asyncio.sleep(_FIRST_PAUSE_S)
                continue
            pause_s = min(_FIRST_PAUSE_S * 1.5 ** min(self.attempts, 64), _LONGEST_PAUSE_S)
            await is_set_within(self._jitter.uniform(0.5, 1) * pause_s, self._finishing)

    async def _exchange(self, address: Address) -> None:
        """Send until all is acknowledged and nothing else comes."""
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with _prepared(socket.socket(family)) as connection:
            await asyncio.wait_for(self._authenticate(connection, address), AUTHENTICATION_S)
            stream, writer = await asyncio.open_connection(sock=connection, limit=_READ_BYTES)
            self._state_is_new = self._state is not None
            tasks = [asyncio.create_task(o) for o in (self._send(writer), self._listen(stream))]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                done.pop().result()
            finally:
                for task in tasks:
                    task.cancel()
                writer.transport.abort()

    async def _authenticate(self, connection: socket.socket, address: Address) -> None:
        """ValueError: whoever listens there is not rank 0 of this run."""
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, (address.host, address.port))
        challenge = await _receive(connection, _NONCE_BYTES)
        asked = self._rank.to_bytes(_RANK_BYTES, "big") + secrets.token_bytes(_NONCE_BYTES)
        proof = _proof(address.token, b"rank", challenge, asked)
        await loop.sock_sendall(connection, asked + proof)
        answer = await _receive(connection, _DIGEST_BYTES)
        if not hmac.compare_digest(answer, _proof(address.token, b"zero", challenge, asked)):
            raise ValueError("the token is wrong")

    async def _send(self, writer: StreamWriter) -> None:
        while True:
            self._acknowledged.clear()
            if self._state_is_new and self._state is not None:
                self._state_is_new = False
                writer.write(frame(STATE, self._state))
                await self._acknowledged.wait()
            elif self._records:
                writer.write(frame(RECORDS, self._records[0]))
                await self._acknowledged.wait()
                self._bytes -= len(self._records.popleft())
            elif not self._finishing.is_set():
                self._wakeup.clear()
                await self._wakeup.wait()
            elif self._last_state is not None:
                self.set_state(self._last_state)
                self._last_state = None
            else:
                return

    async def _listen(self, stream: StreamReader) -> None:
        slots = Semaphore()
        while True:
            kind, payload = await _read_frame(stream, slots)
            self.has_met, self.attempts = True, 0
            if kind == ANNOUNCEMENT:
                self._receive(payload)
            else:
                self._acknowledged.set()

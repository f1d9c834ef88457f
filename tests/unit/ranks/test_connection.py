"""Frames of any size arrive once and in order, and only from ranks that have the token."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from telemetry.ranks import connection
from telemetry.ranks.connection import (
    BARRIER,
    ENDED,
    RECORDS,
    Address,
    Client,
    Rendezvous,
    Server,
    frame,
)


class Listener:
    """Server of rank 0 on this event loop."""

    def __init__(self, token: str = "run") -> None:
        self.received: list[tuple[bytes, bytes, int]] = []
        self.changed = asyncio.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", self.socket.getsockname()[1], token)
        self.server = Server(self.socket, token, self.receive, b"first")

    def receive(self, kind: bytes, payload: bytes, rank: int) -> None:
        self.received.append((kind, payload, rank))
        self.changed.set()

    def start(self) -> None:
        self.running = asyncio.create_task(self.server.run())

    async def has(self, *frames: tuple[bytes, bytes]) -> None:
        while len(self.received) < len(frames):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)
        assert self.received == [(kind, payload, 3) for kind, payload in frames]


def client_of(
    find: Callable[[], Address | None], receive: Callable[[bytes], None] = lambda data: None
) -> Client:
    """Return the client of rank 3, whose rendezvous returns the address of ``find``."""
    rendezvous = Rendezvous("run")
    rendezvous.find = find  # type: ignore[method-assign]
    return Client(rendezvous, 3, receive)


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a test on its own thread, because another test's browser may have a loop on this one."""

    def run() -> None:
        loop = asyncio.SelectorEventLoop()
        try:
            loop.run_until_complete(asyncio.wait_for(test(), 60))
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    loop.run_until_complete(task)
            loop.run_until_complete(asyncio.sleep(0))
            loop.close()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(run).result()


async def finished(client: Client, running: asyncio.Task[None], zero: Listener) -> None:
    client.finish()
    await asyncio.wait_for(running, 30)
    zero.running.cancel()


def test_frames_of_any_size_arrive_in_order_and_announcements_are_received() -> None:
    async def test() -> None:
        zero, announced = Listener(), asyncio.Queue[bytes]()
        zero.start()
        client = client_of(lambda: zero.address, announced.put_nowait)
        running = asyncio.create_task(client.run())
        sent = [os.urandom(size) for size in (1, 2**16, 2**23 + 1, 30 * 2**20, 5)]
        for data in sent:
            client.put(RECORDS, data)
        assert await announced.get() == b"first"
        zero.server.announce(b"second")
        assert await announced.get() == b"second"
        await zero.has(*((RECORDS, data) for data in sent))
        await finished(client, running, zero)
        await zero.has(*((RECORDS, data) for data in sent), (ENDED, b""))

    on_a_loop(test)


def test_frames_are_sent_before_earlier_ones_are_acknowledged() -> None:
    async def test() -> None:
        zero = Listener()
        zero.start()
        client = client_of(lambda: zero.address)
        running = asyncio.create_task(client.run())
        in_flight = list[int]()
        take = zero.receive

        def receive(kind: bytes, payload: bytes, rank: int) -> None:
            in_flight.append(client._in_flight)
            take(kind, payload, rank)

        zero.server._receive = receive
        for number in range(50):
            client.put(RECORDS, bytes([number]))
        await zero.has(*((RECORDS, bytes([number])) for number in range(50)))
        assert max(in_flight) == connection._MOST_IN_FLIGHT
        await finished(client, running, zero)

    on_a_loop(test)


@pytest.mark.parametrize("moment", ["before the server accepts", "after it received"])
def test_frames_that_are_not_acknowledged_are_sent_again(moment: str) -> None:
    """Rank 0 starts late or its connection breaks; the client receives its announcement, too."""

    async def test() -> None:
        zero, announced = Listener(), asyncio.Queue[bytes]()
        address = [zero.address]
        client = client_of(lambda: address[0], announced.put_nowait)
        client.put(RECORDS, b"a" * 10**6)
        client.put(BARRIER, b"5")
        running = asyncio.create_task(client.run())
        other = None
        if moment == "before the server accepts":
            while not client.attempts:  # no server accepts
                await asyncio.sleep(0.01)
                zero.socket.close()
                zero = Listener()
                address[0] = zero.address
        else:
            other = zero
            drop = other.receive

            def receive(kind: bytes, payload: bytes, rank: int) -> None:
                drop(kind, payload, rank)
                raise ValueError("closes the connection without an acknowledgement")

            other.server._receive = receive
            other.start()
            while not other.received:
                await asyncio.sleep(0.01)
            zero = Listener()
            address[0] = zero.address
        zero.start()
        await zero.has((RECORDS, b"a" * 10**6), (BARRIER, b"5"))
        assert await announced.get() == b"first"
        await finished(client, running, zero)
        if other is not None:
            other.running.cancel()

    on_a_loop(test)


async def stranger(zero: Listener, sends: bytes) -> bytes:
    """Return the bytes that a client without the token receives until the connection is closed."""
    stream, writer = await asyncio.open_connection("127.0.0.1", zero.address.port)
    with suppress(OSError):
        writer.write(sends)
    found = b""
    with suppress(OSError):
        found = await stream.read()
    writer.close()
    return found


def test_unauthenticated_peers_receive_at_most_a_nonce_and_store_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "AUTHENTICATION_S", 0.2)

    async def test() -> None:
        zero = Listener()
        zero.start()
        for sends in (b"GET / HTTP/1.1\r\n\r\n", b"", os.urandom(10**6), frame(RECORDS, b"x" * 99)):
            assert len(await stranger(zero, sends)) <= 68, "a nonce and a digest, at most"
        other = client_of(lambda: zero.address._replace(token="other"))
        other.put(RECORDS, b"records")
        running = asyncio.create_task(other.run())
        while other.attempts < 3:
            await asyncio.sleep(0.01)
        running.cancel()
        assert zero.received == []

    on_a_loop(test)


def test_a_rank_sends_no_records_to_an_unauthenticated_server() -> None:
    """Server without the token at the address of a dead rank 0."""

    async def test() -> None:
        received = bytearray()

        async def pretend(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(os.urandom(68))
            received.extend(await stream.read(2**20))
            received.extend(await stream.read(2**20))
            writer.close()

        server = await asyncio.start_server(pretend, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], "run")
        client = client_of(lambda: address)
        client.put(RECORDS, b"records" * 100)
        running = asyncio.create_task(client.run())
        while client.attempts < 2:
            await asyncio.sleep(0.01)
        running.cancel()
        server.close()
        assert b"records" not in received
        assert len(received) % 68 == 0

    on_a_loop(test)


def test_many_unauthenticated_peers_do_not_block_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_UNAUTHENTICATED", 2)
    monkeypatch.setattr(connection, "AUTHENTICATION_S", 1000.0)

    async def test() -> None:
        zero = Listener()
        zero.start()
        strangers = [socket.create_connection(("127.0.0.1", zero.address.port)) for _ in range(6)]
        client = client_of(lambda: zero.address)
        client.put(RECORDS, b"records")
        running = asyncio.create_task(client.run())
        await zero.has((RECORDS, b"records"))
        await finished(client, running, zero)
        for one in strangers:
            one.settimeout(0)
        nonces = [len(one.recv(99)) for one in strangers]
        assert nonces == [36] * 6, "each received a nonce"
        for one in strangers:
            one.close()

    on_a_loop(test)


def test_above_the_limit_middle_records_are_dropped_and_barrier_frames_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_QUEUED_BYTES", 2)

    async def test() -> None:
        zero = Listener()
        client = client_of(lambda: zero.address)
        for data in (b"0", b"a", b"b", b"c"):
            client.put(RECORDS, data)
        client.put(BARRIER, b"5")
        zero.start()
        running = asyncio.create_task(client.run())
        await zero.has((RECORDS, b"0"), (BARRIER, b"5"), (RECORDS, b"c"))
        await finished(client, running, zero)

    on_a_loop(test)


def test_ranks_beyond_the_file_descriptors_are_refused_and_accepted_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test() -> None:
        zero = Listener()
        zero.start()
        monkeypatch.setattr(connection, "_most_files", lambda: 8)
        client = client_of(lambda: zero.address)
        client.put(RECORDS, b"records")
        running = asyncio.create_task(client.run())
        while client.attempts < 3:
            await asyncio.sleep(0.01)
        assert zero.server.refused == {3}
        assert zero.received == []
        monkeypatch.setattr(connection, "_most_files", lambda: 10**6)
        await zero.has((RECORDS, b"records"))
        assert zero.server.refused == set()
        await finished(client, running, zero)

    on_a_loop(test)


def test_retries_back_off_exponentially_with_jitter() -> None:
    async def test() -> None:
        pauses: list[float] = []
        client = client_of(lambda: None)

        async def pause(seconds: float, event: asyncio.Event) -> bool:
            pauses.append(seconds)
            if len(pauses) == 60:
                client.finish()
            return event.is_set()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(connection, "is_set_within", pause)
            await client.run()
        assert pauses[0] <= 0.075
        assert all(15 <= pause <= 30 for pause in pauses[-30:])
        assert len(set(pauses)) == 60

    on_a_loop(test)

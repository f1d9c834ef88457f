"""Frames of any size arrive once and in order, and only from ranks that have the token."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import wraps
from typing import Any

import pytest

from telemetry.ranks import connection
from telemetry.ranks.connection import (
    BARRIER,
    CONNECTED,
    ENDED,
    RECORDS,
    Address,
    Client,
    Rendezvous,
    Server,
    frame,
)
from tests.helpers.scripts import start_script


class Listener:
    """Server of rank 0 on this event loop."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes, bytes, int]] = []
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = Address("127.0.0.1", listening.getsockname()[1], "run")
        self.server = Server(listening, "run", lambda *one: self.received.append(one), b"first")
        self.running = asyncio.create_task(self.server.run())

    async def has(self, *frames: tuple[bytes, bytes]) -> None:
        await until(lambda: len(self.received) > len(frames))
        assert self.received == [(*one, 3) for one in ((CONNECTED, b""), *frames)]


class Sender:
    """Client of rank 3, whose rendezvous returns the address of ``find``."""

    def __init__(self, find: Callable[[], Address | None]) -> None:
        rendezvous = Rendezvous("run")
        rendezvous.find = find  # type: ignore[method-assign]
        self.announced = asyncio.Queue[bytes]()
        self.client = Client(rendezvous, 3, self.announced.put_nowait)

    def start(self, *records: bytes) -> None:
        for data in records:
            self.client.put(RECORDS, data)
        self.running = asyncio.create_task(self.client.run())

    async def finish(self) -> None:
        self.client.finish()
        await self.running


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():
        await asyncio.sleep(0.01)


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on its own thread, because another test's browser may have a loop on this one."""

    @wraps(test)
    def on_a_thread(**fixtures: Any) -> None:
        with ThreadPoolExecutor(1) as executor:
            executor.submit(asyncio.run, asyncio.wait_for(test(**fixtures), 300)).result()

    return on_a_thread


@on_a_loop
async def test_frames_of_any_size_arrive_in_order_and_announcements_are_received() -> None:
    zero = Listener()
    rank = Sender(lambda: zero.address)
    in_flight = list[int]()
    take = zero.server._receive

    def receive(*one: Any) -> None:
        in_flight.append(rank.client._in_flight)
        take(*one)

    zero.server._receive = receive
    sent = [os.urandom(size) for size in (1, 2**16, 2**23 + 1, 30 * 2**20, *[5] * 50)]
    rank.start(*sent)
    assert await rank.announced.get() == b"first"
    zero.server.announce(b"second")
    assert await rank.announced.get() == b"second"
    await zero.has(*((RECORDS, data) for data in sent))
    await rank.finish()
    await zero.has(*((RECORDS, data) for data in sent), (ENDED, b""))
    assert max(in_flight) == 8, "frames are sent before earlier ones are acknowledged"


@on_a_loop
async def test_frames_that_are_not_acknowledged_are_sent_again() -> None:
    """A connection breaks; the client receives the announcement of the next one, too."""
    broken = Listener()
    addresses = [broken.address]
    rank = Sender(lambda: addresses[-1])
    received = asyncio.Event()

    def receive(kind: bytes, *others: Any) -> None:
        if kind == RECORDS:
            received.set()
            raise ValueError("closes the connection without an acknowledgement")

    broken.server._receive = receive
    rank.start(b"a" * 10**6)
    await received.wait()
    rank.client.put(BARRIER, b"5")
    zero = Listener()
    addresses.append(zero.address)
    await zero.has((RECORDS, b"a" * 10**6), (BARRIER, b"5"))
    assert await rank.announced.get() == b"first"
    await rank.finish()


@on_a_loop
async def test_frames_that_are_read_together_take_limited_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second rank stops in a large frame; the next large one waits, small ones do not."""
    monkeypatch.setattr(connection, "MAX_READ_BYTES", 3 * 2**20)
    zero = Listener()
    frames = connection._Frames()
    zero.server._frames = frames
    stopped, late = asyncio.StreamReader(), asyncio.StreamReader()
    stopped.feed_data(frame(RECORDS, b"x" * 2**21)[:1000])
    first = asyncio.create_task(frames.read(stopped))
    await until(lambda: frames._bytes)
    late.feed_data(frame(RECORDS, b"y" * 2**21))
    second = asyncio.create_task(frames.read(late))
    rank = Sender(lambda: zero.address)
    rank.start(b"small")
    await zero.has((RECORDS, b"small"))
    assert not second.done()
    stopped.feed_eof()
    with pytest.raises(asyncio.IncompleteReadError):
        await first
    assert (await second)[1] == b"y" * 2**21
    assert frames._bytes == 0
    await rank.finish()


async def received_by_stranger(zero: Listener, sends: bytes) -> bytes:
    """Return the bytes that a client without the token receives until the connection is closed."""
    stream, writer = await asyncio.open_connection("127.0.0.1", zero.address.port)
    found = b""
    with suppress(OSError):
        writer.write(sends)
        found = await stream.read()
    writer.close()
    return found


@on_a_loop
async def test_unauthenticated_peers_receive_at_most_a_nonce_and_store_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "AUTHENTICATION_S", 0.2)
    zero = Listener()
    for sends in (b"GET / HTTP/1.1\r\n\r\n", b"", os.urandom(10**6), frame(RECORDS, b"x" * 99)):
        found = await received_by_stranger(zero, sends)
        assert len(found) <= 68, "a nonce and a digest, at most"
    other = Sender(lambda: zero.address._replace(token="other"))
    other.start(b"records")
    await until(lambda: other.client.attempts >= 3)
    assert zero.received == []


@on_a_loop
async def test_a_rank_sends_no_records_to_an_unauthenticated_server() -> None:
    """Server without the token at the address of a dead rank 0."""
    received = list[bytes]()

    async def pretend(stream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(os.urandom(68))
        received.append(await stream.read())
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    rank = Sender(lambda: Address("127.0.0.1", server.sockets[0].getsockname()[1], "run"))
    rank.start(b"records" * 100)
    await until(lambda: len(received) >= 2)
    server.close()
    assert {len(data) for data in received} == {68}, "a nonce and a digest"


@on_a_loop
async def test_above_the_limit_middle_records_are_dropped_and_barrier_frames_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_QUEUED_BYTES", 2)
    addresses = list[Address]()
    rank = Sender(lambda: addresses[0] if addresses else None)
    rank.start(b"0", b"a", b"b", b"c")
    rank.client.put(BARRIER, b"5")
    zero = Listener()
    addresses.append(zero.address)
    await zero.has((RECORDS, b"0"), (BARRIER, b"5"), (RECORDS, b"c"))
    await rank.finish()


STORE = """
import torch.distributed as d, time
store = d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(300)
"""
RANK = """
import asyncio, signal, sys, torch.distributed as d
from telemetry.ranks.connection import in_thread
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
store = d.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
print("connected", flush=True)
signal.sigwait({signal.SIGUSR1})
async def ask():
    asking = asyncio.ensure_future(in_thread(lambda: store.check(["a"])))
    print(len((await asyncio.wait([asking], timeout=0.1))[0]), flush=True)
asyncio.new_event_loop().run_until_complete(ask())
"""


@pytest.mark.slow
def test_a_rank_ends_well_while_its_call_of_a_frozen_store_fails(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folders = [tmp_path_factory.mktemp(name) for name in ("store", "rank")]
    with (
        start_script(folders[0], STORE) as store,
        start_script(folders[1], RANK, store.stdout.readline().strip()) as rank,
    ):
        assert rank.stdout.readline() == "connected\n"
        store.send_signal(signal.SIGSTOP)
        rank.send_signal(signal.SIGUSR1)
        assert rank.stdout.readline() == "0\n"
        store.kill()
        assert rank.wait() == 0

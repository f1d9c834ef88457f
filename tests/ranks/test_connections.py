"""Messages of any size arrive whole and in order, and what is not acknowledged is sent again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from telemetry.ranks import connections
from telemetry.ranks.connections import Inbox, Uplink
from telemetry.ranks.meeting import Address, Meeting, this_machine


class Listener:
    """A rank above, on this event loop; it takes messages until it is told not to."""

    def __init__(self, password: str = "run") -> None:
        self.taken: list[bytes] = []
        self.changed = asyncio.Event()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = Address(this_machine(), [], self.socket.getsockname()[1])
        self.inbox = Inbox(password, self.take, b"news")

    def take(self, data: bytes) -> None:
        self.taken.append(data)
        self.changed.set()

    async def has(self, *messages: bytes) -> None:
        while self.taken != [*messages]:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)


def uplink_to(
    *addresses: Address, hear: Callable[[bytes], None] = lambda data: None, patience_s: float = 1e3
) -> Uplink:
    """To the first of the addresses, and then to the last."""
    meeting = Meeting("run")
    meeting.password, meeting.first = "run", addresses[-1]
    uplink = Uplink(meeting, patience_s, hear)
    left = [*addresses]

    async def look_for() -> Address | None:
        return None if uplink._is_done else left.pop(0) if len(left) > 1 else left[0]

    uplink._look_for = look_for
    return uplink


def on_a_loop(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """On a thread of its own: another test's browser may have a loop on this one."""

    def run() -> None:
        loop = asyncio.SelectorEventLoop()
        loop.run_until_complete(test())
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    with ThreadPoolExecutor(1) as executor:
        executor.submit(run).result()


def test_messages_of_any_size_arrive_in_order_and_news_come_back() -> None:
    async def test() -> None:
        above, heard = Listener(), asyncio.Queue[bytes]()
        await above.inbox.open(above.socket)
        uplink = uplink_to(above.address, hear=heard.put_nowait)
        running = asyncio.create_task(uplink.run())
        sent = [os.urandom(size) for size in (1, 2**16, 2**23 + 1, 30 * 2**20, 5)]
        for data in sent:
            uplink.put(data, droppable=False)
        assert await heard.get() == b"news"
        above.inbox.post(b"more")
        assert await heard.get() == b"more"
        await above.has(*sent)
        uplink.finish()
        await asyncio.wait_for(running, 30)
        above.inbox.close()

    on_a_loop(test)


@pytest.mark.parametrize("way", ["is silent", "dies", "ends"])
def test_one_above_that_goes_is_replaced_by_the_first(way: str) -> None:
    async def test() -> None:
        leader, first = Listener(), Listener()
        await first.inbox.open(first.socket)
        uplink = uplink_to(leader.address, first.address, patience_s=5)
        running = asyncio.create_task(uplink.run())
        if way == "ends":
            await leader.inbox.open(leader.socket)
            uplink.put(b"taken", droppable=True)
            await leader.has(b"taken")
            leader.inbox.close()
            while uplink._address != first.address:
                await asyncio.sleep(0.01)
        uplink.put(b"a", droppable=True)
        while not (uplink._is_sent or first.taken):
            await asyncio.sleep(0.01)
        uplink.look(1.0)
        uplink.look(5.9)
        if way == "is silent":
            assert first.taken == []
            uplink.look(6.1)
        elif way == "dies":
            leader.socket.close()
        uplink.put(b"b", droppable=True)
        await first.has(b"a", b"b")
        uplink.finish()
        await asyncio.wait_for(running, 30)
        leader.socket.close()
        first.inbox.close()

    on_a_loop(test)


def test_a_first_rank_that_is_silent_is_waited_for() -> None:
    async def test() -> None:
        first = Listener()
        uplink = uplink_to(first.address, patience_s=5)
        running = asyncio.create_task(uplink.run())
        uplink.put(b"a", droppable=True)
        while not uplink._is_sent:
            await asyncio.sleep(0.01)
        uplink.look(1.0)
        uplink.look(1e6)
        await first.inbox.open(first.socket)
        await first.has(b"a")
        uplink.finish()
        await asyncio.wait_for(running, 30)
        first.inbox.close()

    on_a_loop(test)


def test_strangers_are_not_taken() -> None:
    async def test() -> None:
        above = Listener()
        await above.inbox.open(above.socket)
        for greeting in (b"GET / HTTP/1.1\r\n\r\n", (5).to_bytes(8, "big") + b"other"):
            stream, writer = await asyncio.open_connection("127.0.0.1", above.address.port)
            writer.write(greeting)
            assert await stream.read() == b""
            writer.close()
        assert above.taken == []
        above.inbox.close()

    on_a_loop(test)


def test_of_too_much_the_oldest_records_are_left_out_and_no_notices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connections, "MAX_BYTES", 2)

    async def test() -> None:
        above = Listener()
        uplink = uplink_to(above.address)
        for data in (b"0", b"!", b"a", b"b", b"c"):
            uplink.put(data, droppable=data != b"!")
        await above.inbox.open(above.socket)
        running = asyncio.create_task(uplink.run())
        await above.has(b"!", b"c")
        uplink.finish()
        await asyncio.wait_for(running, 30)
        above.inbox.close()

    on_a_loop(test)

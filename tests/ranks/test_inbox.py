"""Parts of any size arrive whole, in order, and leave nothing on the store."""

from __future__ import annotations

import os
import socket

import pytest

from telemetry.ranks.stores import (
    PIECE_BYTES,
    Inbox,
    exchange,
    join,
    leave,
    open_client,
    reach,
    sever,
)


def test_parts_of_any_size_arrive_and_are_deleted() -> None:
    inbox = Inbox()
    child, other = join(inbox.store), join(inbox.store)
    assert inbox.collect() == []
    sizes = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 5 * PIECE_BYTES]
    sent = [os.urandom(size) for size in sizes]
    inbox.post("né".encode())
    reply = exchange(inbox.store, child, 0, sent)
    assert (reply.taken, reply.leaves, reply.news) == (0, False, "né".encode())
    exchange(inbox.store, other, 0, [b"other"])
    keys = inbox.store.num_keys()
    assert inbox.collect() == [*sent, b"other"]
    assert inbox.store.num_keys() == keys - len(sent) - 1 - (1 + 2 + 5)
    assert exchange(inbox.store, child, len(sent), []).taken == len(sent)
    inbox.dismiss()
    assert exchange(inbox.store, other, 1, []).leaves
    leave(inbox.store)
    assert inbox.children == 1


def test_calls_to_a_server_that_is_severed_fail_and_nothing_stays_open() -> None:
    inbox = Inbox()
    peer = reach(["localhost"], inbox.store.port)
    store = open_client(peer)
    child = join(store)
    one, other = socket.socketpair()
    with one, other:  # which have no addresses
        before = len(os.listdir("/dev/fd"))
        sever(peer)
        assert len(os.listdir("/dev/fd")) <= before
    with pytest.raises(RuntimeError):
        exchange(store, child, 0, [b"lost"])

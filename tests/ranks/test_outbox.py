"""What waits to be sent is kept until it is taken, in order, and bounded."""

from __future__ import annotations

from telemetry.ranks.uplink import MAX_SENT, MAX_SENT_BYTES, Outbox


def test_what_is_not_taken_is_sent_again_to_somebody_new() -> None:
    outbox = Outbox()
    outbox.put(b"hello", droppable=False)
    outbox.put(b"a", droppable=True)
    outbox.connect()
    assert outbox.to_send() == (0, [b"hello", b"a"])
    assert outbox.to_send() == (2, [])
    outbox.put(b"b", droppable=True)
    assert outbox.to_send() == (2, [b"b"])
    outbox.take(2)
    outbox.connect()
    assert outbox.to_send() == (0, [b"b"])
    outbox.take(1)
    assert outbox.is_empty


def test_little_is_under_way_at_a_time() -> None:
    outbox = Outbox()
    for _ in range(2 * MAX_SENT):
        outbox.put(b"a", droppable=True)
    assert len(outbox.to_send()[1]) == MAX_SENT
    assert outbox.to_send() == (MAX_SENT, [])
    outbox.take(3)
    assert outbox.to_send() == (MAX_SENT, [b"a"] * 3)
    large = Outbox()
    for _ in range(3):
        large.put(bytes(MAX_SENT_BYTES // 2 + 1), droppable=True)
    assert len(large.to_send()[1]) == 1
    assert large.to_send() == (1, [])
    large.take(1)
    assert len(large.to_send()[1]) == 1


def test_of_too_much_the_oldest_records_are_left_out_and_no_notices() -> None:
    outbox = Outbox(max_bytes=3)
    outbox.put(b"0", droppable=True)
    outbox.to_send()
    outbox.put(b"!", droppable=False)
    for letter in b"abc":
        outbox.put(bytes([letter]), droppable=True)
    outbox.take(1)
    assert outbox.to_send() == (1, [b"!", b"c"])

"""Parts of steps become whole ones, in order, each rank once, without waiting for who is gone."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.ranks.channel import Attendance
from telemetry.ranks.gathering import Gathering, Kind, Message, News, ranges_of

WORLD = 6


def merge(payloads: Sequence[bytes]) -> bytes:
    return b"".join(payloads)


def part(place: int, *ranks: int, kind: Kind = Kind.RECORD) -> Message:
    """What these ranks measured: a byte each."""
    return Message(kind=kind, place=place, ranks=frozenset(ranks), payload=bytes(sorted(ranks)))


def gathering(
    *, start_s: float = 0.0, forwards_late: bool = False, max_bytes: int = 1000
) -> Gathering:
    return Gathering(
        world_size=WORLD,
        merge=merge,
        patience_s=10.0,
        start_s=start_s,
        forwards_late=forwards_late,
        max_bytes=max_bytes,
    )


def taken(gathered: Gathering, now: float) -> list[tuple[int, list[int]]]:
    """Steps that are complete; the payload holds each rank once."""
    found = []
    while (whole := gathered.take(now)) is not None:
        assert sorted(whole.payload) == sorted(whole.ranks)
        found.append((whole.place, sorted(whole.ranks)))
    return found


@given(
    st.integers(0, 2).flatmap(
        lambda kind: st.frozensets(st.integers(0, 20_000)).map(
            lambda ranks: Message(
                kind=Kind(kind), place=2**50 + 7, phase="é", ranks=ranks, payload=b"\0\xff"
            )
        )
    )
)
def test_a_part_travels_as_bytes(sent: Message) -> None:
    assert Message.from_bytes(sent.to_bytes()) == sent


def test_a_strange_part_is_refused_and_news_travel() -> None:
    with pytest.raises(ValueError, match="Expecting value"):
        Message.from_bytes(b"?")
    news = News(full_steps=(3, 5), raise_at=7, message="nonfinite")
    assert News.from_bytes(news.to_bytes()) == news
    assert ranges_of({0, 1, 2, 3, 7, 9, 10}) == "0-3,7,9-10"


@given(st.data())
def test_whatever_the_order_of_arrival_each_step_holds_every_rank_once(data: st.DataObject) -> None:
    """Ranks send each step in order, but they are interleaved, and some parts come twice."""
    gathered = gathering(start_s=100.0)
    every_n = [data.draw(st.sampled_from([1, 2, 3]), label=f"interval {r}") for r in range(WORLD)]
    queues = [[step for step in range(7) if step % n == 0] for n in every_n]
    found = []
    while any(queues):
        rank = data.draw(st.sampled_from([r for r in range(WORLD) if queues[r]]))
        sent = part(queues[rank].pop(0), rank)
        for _ in range(data.draw(st.integers(1, 2))):
            gathered.add(sent, 0.0)
        found += taken(gathered, 0.0)
    while (whole := gathered.take(0.0, hurry=True)) is not None:
        found.append((whole.place, sorted(whole.ranks)))
    assert found == [
        (step, [r for r in range(WORLD) if step % every_n[r] == 0])
        for step in range(7)
        if any(step % n == 0 for n in every_n)
    ]
    assert gathered.silent == frozenset(
        r for r in range(WORLD) if max(s for s in range(7) if s % every_n[r] == 0) < found[-1][0]
    )


def test_the_larger_of_overlapping_parts_stays() -> None:
    gathered = gathering()
    for sent in [part(0, 2), part(0, 1, 2, 3), part(0, 3, 4), part(0, 5), part(0, 2, 5)]:
        gathered.add(sent, 0.0)
    assert taken(gathered, 0.0) == [(0, [1, 2, 3, 5])]


def test_a_silent_rank_is_waited_for_once() -> None:
    gathered = gathering()
    gathered.add(part(0, *range(WORLD)), 0.0)
    assert len(taken(gathered, 0.0)) == 1
    gathered.add(part(1, 0, 1, 2, 3), 1.0)
    gathered.add(part(1, 4), 5.0)
    gathered.add(part(2, 0, 1, 2, 3, 4), 6.0)
    assert taken(gathered, 10.9) == []
    assert taken(gathered, 11.0) == [(1, [0, 1, 2, 3, 4]), (2, [0, 1, 2, 3, 4])]
    assert gathered.silent == {5}
    gathered.add(part(3, 0, 1, 2, 3, 4), 12.0)
    assert taken(gathered, 12.0) == [(3, [0, 1, 2, 3, 4])]
    gathered.add(part(1, 5), 13.0)
    assert gathered.silent == frozenset()
    gathered.add(part(4, 0, 1, 2, 3, 4), 14.0)
    assert taken(gathered, 14.0) == []
    gathered.add(part(4, 5), 15.0)
    assert taken(gathered, 15.0) == [(4, [0, 1, 2, 3, 4, 5])]


def test_a_rank_with_much_to_send_is_not_late() -> None:
    gathered = gathering()
    gathered.add(part(0, 0, 1), 0.0)
    taken(gathered, 0.0)
    for step in range(1, 40):
        gathered.add(part(step, 0), 0.0)
    for step in range(1, 40):
        gathered.add(part(step, 1), float(step))
        assert taken(gathered, float(step)) == [(step, [0, 1])]


def test_one_that_leaves_is_not_waited_for_and_one_that_joins_is() -> None:
    gathered = gathering()
    gathered.add(part(0, 3, kind=Kind.JOINED), 0.0)
    gathered.add(part(0, 0, 1), 0.0)
    assert taken(gathered, 1.0) == []
    gathered.add(part(0, 3, kind=Kind.LEFT), 1.0)
    assert taken(gathered, 1.0) == [(0, [0, 1])]
    assert gathered.members == {0, 1}
    assert gathered.never_joined == {2, 4, 5}


def test_phases_of_one_place_wait_for_who_has_not_passed_it() -> None:
    gathered = gathering()
    gathered.add(part(0, 0, 1), 0.0)
    taken(gathered, 0.0)

    def add(place: int, phase: str, rank: int) -> None:
        ranks = frozenset({rank})
        gathered.add(Message(place=place, phase=phase, ranks=ranks, payload=bytes([rank])), 0.0)

    add(2, "validation", 0)
    add(2, "test", 0)
    add(2, "validation", 1)
    assert taken(gathered, 0.0) == []
    add(2, "test", 1)
    assert taken(gathered, 0.0) == [(2, [0, 1]), (2, [0, 1])]
    add(4, "test", 0)
    add(5, "", 0)
    assert taken(gathered, 0.0) == []
    add(5, "", 1)
    assert taken(gathered, 0.0) == [(4, [0]), (5, [0, 1])]
    add(4, "test", 1)
    assert taken(gathered, 0.0) == []


def test_what_comes_late_is_handed_on_below_and_memory_is_bounded() -> None:
    gathered = gathering(forwards_late=True, max_bytes=3)
    gathered.add(part(0, 0), 0.0)
    gathered.add(part(1, 1), 0.0)
    gathered.add(part(1, 0), 0.0)
    gathered.add(part(2, 0), 0.0)
    assert taken(gathered, 0.0) == [(0, [0]), (1, [0, 1])]
    gathered.add(part(0, 1), 0.0)
    assert taken(gathered, 0.0) == [(0, [1])]


def test_a_merger_that_fails_costs_one_step() -> None:
    def fail(payloads: Sequence[bytes]) -> bytes:
        raise struct.error(payloads)

    gathered = Gathering(world_size=2, merge=fail, patience_s=1.0, start_s=0.0, forwards_late=False)
    gathered.add(part(0, 0), 0.0)
    gathered.add(part(0, 1), 0.0)
    gathered.add(part(1, 0, 1), 0.0)
    with pytest.raises(struct.error):
        gathered.take(0.0)
    assert taken(gathered, 0.0) == [(1, [0, 1])]


def test_attendance_is_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    attendance, gathered = Attendance(WORLD), gathering()
    gathered.add(part(0, 0, 1, 2, kind=Kind.JOINED), 0.0)
    for step, here in enumerate([{0, 1}, {0, 1}, {0, 1, 2}, {0, 1}, {0, 1, 2}]):
        gathered.add(part(step, *here), 100.0 * step)
        while (whole := gathered.take(100.0 * step + 50)) is not None:
            attendance.check(whole.place, whole.ranks, gathered)
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "from step 0 on, the records hold 2 of 6 ranks: ranks 3-5 made no HookLogger for this run "
        "so far",
        "from step 0 on, the records hold 2 of 6 ranks: rank 2 sent nothing in time and may hang "
        "or have died",
        "from step 2 on, the records hold what rank 2 measured",
    ]

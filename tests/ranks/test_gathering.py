"""Parts of steps become whole ones, in order, each rank once, without waiting for who is gone."""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.ranks import messages
from telemetry.ranks.columns import Table
from telemetry.ranks.gathering import Gathering
from telemetry.ranks.measured import Measured, MeasuredParameters
from telemetry.ranks.messages import END, Message, News, blocks, decode, encode
from telemetry.shared.plain_text import ranks_in_words

WORLD = 6


def measured(step: int, *ranks: int) -> Measured:
    return Measured(
        step=step,
        wall_time=0.0,
        size=WORLD,
        place=step,
        ranks=frozenset(ranks),
        alike=(min(ranks),),
        scalars=Table.merge_all(Table.of_figures(rank, {str(rank): 1.0}) for rank in ranks),
    )


def part(place: int, *ranks: int) -> Message:
    """What these ranks measured."""
    return Message.of([measured(place, *ranks)])


def left(rank: int) -> Message:
    return Message(places=(END,), ranks=frozenset({rank}))


def gathering(*, start_s: float = 0.0, is_first: bool = True, max_bytes: int = 10**6) -> Gathering:
    return Gathering(
        world_size=WORLD,
        patience_s=10.0,
        start_s=start_s,
        is_first=is_first,
        max_bytes=max_bytes,
    )


def taken(gathered: Gathering, now: float) -> list[tuple[int, list[int]]]:
    """Steps that are complete; each holds what every rank of it measured."""
    found = []
    while (whole := gathered.take(now)) is not None:
        assert whole.scalars.means() == {str(rank): 1.0 for rank in whole.ranks}
        found.append((whole.place, sorted(whole.ranks)))
    return found


@given(st.frozensets(st.integers(0, 20_000)), st.none() | st.integers(0, 5))
def test_a_message_travels_as_bytes(ranks: frozenset[int], held: int | None) -> None:
    places = 2**50 + 6, 2**50 + 7
    sent = Message(ranks=ranks, places=places, held=held, payload=b"\0\xff")
    assert decode(Message, encode(sent)) == sent


def test_a_strange_part_is_refused_and_news_travel() -> None:
    with pytest.raises(ValueError, match="damaged"):
        decode(Message, encode(News()))
    news = News(full_step=5, raise_at=7, message="nonfinite")
    assert decode(News, encode(news)) == news
    assert ranks_in_words({0, 1, 2, 3, 7, 9, 10}) == "ranks 0-3,7,9-10"


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
    while (last := gathered.take(0.0, hurry=True)) is not None:
        found.append((last.place, sorted(last.ranks)))
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
    gathered.add(part(0, 3), 0.0)
    gathered.add(part(1, 0, 1), 0.0)
    assert taken(gathered, 1.0) == [(0, [3])]
    gathered.add(left(3), 1.0)
    assert taken(gathered, 1.0) == [(1, [0, 1])]
    assert gathered.members == {0, 1}


def test_what_comes_late_is_handed_on_below() -> None:
    below, first = gathering(is_first=False), gathering()
    for gathered in (below, first):
        for sent in (part(0, 0), part(1, 1), part(1, 0)):
            gathered.add(sent, 0.0)
        assert taken(gathered, 0.0) == [(0, [0]), (1, [0, 1])]
        gathered.add(part(0, 1), 0.0)
    assert taken(below, 0.0) == [(0, [1])]
    assert taken(first, 0.0) == []


def test_steps_end_when_too_much_waits() -> None:
    waiting = [part(step, 0) for step in (1, 2, 3)]
    gathered = gathering(max_bytes=sum(len(sent.payload) for sent in waiting))
    gathered.add(part(0, 0, 1), 0.0)
    assert len(taken(gathered, 0.0)) == 1
    for sent in waiting:
        gathered.add(sent, 0.0)
    assert taken(gathered, 0.0) == []
    gathered.add(part(4, 0), 0.0)
    assert taken(gathered, 0.0)[:1] == [(1, [0])]


def test_what_cannot_be_merged_costs_one_step() -> None:
    gathered = gathering()
    gathered.add(part(0, 0), 0.0)
    gathered.add(Message(places=(0,), ranks=frozenset({1}), payload=zlib.compress(b"?")), 0.0)
    gathered.add(part(1, 0, 1), 0.0)
    with pytest.raises(ValueError, match="same version"):
        gathered.take(0.0)
    assert taken(gathered, 0.0) == [(1, [0, 1])]


def test_attendance_is_told_once_each(caplog: pytest.LogCaptureFixture) -> None:
    gathered = gathering()
    gathered.add(Message(ranks=frozenset({0, 1, 2})), 0.0)
    for step, here in enumerate([{0, 1}, {0, 1}, {0, 1, 2}, {0, 1}, {0, 1, 2}]):
        gathered.add(part(step, *here), 100.0 * step)
        while (found := gathered.take(100.0 * step + 50)) is not None:
            gathered.tell_missing(found)
    assert [message.partition(": ")[2] for message in caplog.messages] == [
        "from step 0 on, the records hold 2 of 6 ranks: ranks 3-5 made no HookLogger for this run "
        "so far",
        "from step 0 on, the records hold 2 of 6 ranks: rank 2 sent nothing in time: they "
        "ended with fewer batches, hang or died",
        "from step 2 on, the records hold what rank 2 measured",
    ]


def test_small_steps_of_the_same_ranks_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = [measured(place, 0) for place in range(4)], measured(4, 1)
    assert [*blocks([*own[:2], other, *own[2:]])] == [own[:2], [other], own[2:]]
    monkeypatch.setattr(messages, "BLOCK_BYTES", 0)
    stage = MeasuredParameters(
        stage=0, layout_id="", layout=None, grads=Table.of(range(9), norm=np.zeros(9))
    )
    large = replace(measured(0, 0), stages={stage.key: stage})
    assert [*blocks([large, *own[1:]])] == [[large], own[1:]]
    gathered = gathering()
    gathered.add(Message.of(own), 0.0)
    assert taken(gathered, 0.0) == [(place, [0]) for place in range(4)]

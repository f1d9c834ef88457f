"""Records of ranks become merged steps in order, with each rank once and no exited rank."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.ranks.collector import Collector
from telemetry.ranks.rank_record import RankRecord
from tests.helpers.members import measured, scalars_of, total

WORLD = 6
EVERY_N = st.lists(st.sampled_from([1, 2, 3]), min_size=WORLD, max_size=WORLD)


def part(step: int, rank: int) -> RankRecord:
    return replace(measured(rank, step), size=WORLD, sequence=step)


def collector(*, timeout_s: float = 10.0, max_bytes: int = 10**6) -> Collector:
    return Collector(world_size=WORLD, timeout_s=timeout_s, max_bytes=max_bytes)


def add(collected: Collector, step: int, ranks: str, now: float) -> None:
    """Add the parts of these ranks: ``"014"``."""
    for rank in map(int, ranks):
        collected.add(part(step, rank), now)


def complete_steps(collected: Collector, now: float) -> list[tuple[int, str]]:
    """Take the complete steps; check that each holds the values of all its ranks."""
    found = []
    while (step := collected.take(now)) is not None:
        ranks = "".join(map(str, sorted(step.parts)))
        assert scalars_of(step) == total([*step.parts], step.step)
        found.append((step.step, ranks))
    return found


def started() -> Collector:
    """Return a collector after step 0 of all ranks and after the timeout of the start."""
    collected = collector()
    add(collected, 0, "012345", -20.0)
    add(collected, 0, "012345", 0.0)
    assert complete_steps(collected, 0.0) == [(0, "012345")]
    return collected


@pytest.mark.slow
@given(EVERY_N, st.randoms(use_true_random=False))
def test_each_step_has_every_rank_once_in_any_order_of_arrival(
    every_n: list[int], dice: random.Random
) -> None:
    """Ranks send each step in order, but they are interleaved, and some parts come twice."""
    collected = collector(timeout_s=100.0)
    queues = [[step for step in range(7) if step % n == 0] for n in every_n]
    found = []
    while any(queues):
        rank = dice.choice([r for r in range(WORLD) if queues[r]])
        sent = part(queues[rank].pop(0), rank)
        for _ in range(dice.randint(1, 2)):
            collected.add(sent, 0.0)
        found += complete_steps(collected, 0.0)
    while (last := collected.take(0.0, hurry=True)) is not None:
        found.append((last.step, "".join(map(str, sorted(last.parts)))))
    assert found == [
        (step, "".join(str(r) for r in range(WORLD) if step % every_n[r] == 0))
        for step in range(7)
        if any(step % n == 0 for n in every_n)
    ]
    assert collected.unresponsive == frozenset(
        r for r in range(WORLD) if max(s for s in range(7) if s % every_n[r] == 0) < found[-1][0]
    )


def test_an_unresponsive_rank_delays_steps_only_until_its_first_timeout() -> None:
    collected = started()
    add(collected, 1, "0123", 1.0)
    add(collected, 1, "4", 5.0)
    add(collected, 2, "01234", 6.0)
    assert complete_steps(collected, 10.9) == []
    assert complete_steps(collected, 11.0) == [(1, "01234"), (2, "01234")]
    assert collected.unresponsive == {5}
    add(collected, 3, "01234", 12.0)
    assert complete_steps(collected, 12.0) == [(3, "01234")]
    add(collected, 1, "5", 13.0)
    assert collected.unresponsive == frozenset()
    add(collected, 4, "01234", 14.0)
    assert complete_steps(collected, 14.0) == []
    add(collected, 4, "5", 15.0)
    assert complete_steps(collected, 15.0) == [(4, "012345")]


def test_a_slow_rank_that_keeps_sending_is_not_unresponsive() -> None:
    collected = started()
    for step in range(1, 40):
        add(collected, step, "01234", 0.0)
    for step in range(1, 40):
        add(collected, step, "5", float(step))
        assert complete_steps(collected, float(step)) == [(step, "012345")]


def test_late_and_repeated_parts_of_a_delivered_step_are_dropped() -> None:
    collected = started()
    add(collected, 0, "012345", 1.0)
    assert complete_steps(collected, 50.0) == []
    add(collected, 1, "0", 50.0)
    assert complete_steps(collected, 60.0) == [(1, "0")]
    add(collected, 1, "1", 60.0)
    assert complete_steps(collected, 100.0) == []


def test_the_oldest_step_is_delivered_incomplete_above_the_byte_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RankRecord, "nbytes", 10)
    collected = collector(max_bytes=30)
    for step in (1, 2, 3):
        add(collected, step, "0", 0.0)
    assert complete_steps(collected, 0.0) == []
    add(collected, 4, "0", 0.0)
    assert complete_steps(collected, 0.0) == [(1, "0")]

"""All ranks raise at the end of the same step, and no rank blocks forever or queues too much."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from telemetry.ranks import collector, exchange
from telemetry.ranks.collector import Barrier
from telemetry.ranks.connection import BARRIER, ENDED
from telemetry.ranks.exchange import RankExchange
from telemetry.ranks.merging import MergedStep
from tests.helpers.members import ALERT, exchange_of, measured

Start = Callable[..., RankExchange]


def test_a_rank_beyond_the_decided_step_raises_at_the_end_of_its_step() -> None:
    late = Barrier(first_step=20)
    assert late.close() == 20
    late.decide(7)
    assert late.step_ended(20)
    assert not late.step_ended(21), "once"


def test_an_alert_for_a_step_that_never_starts_is_raised_at_the_end() -> None:
    own = Barrier()
    assert not own.step_ended(None)
    assert not own.step_ended(3)
    own.close()
    own.decide(4)
    assert own.step_ended(None)
    assert not own.step_ended(None)


def test_training_continues_without_a_decision_of_rank_0(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(collector, "BARRIER_S", 0.01)
    silent, closed = Barrier(), Barrier()
    silent.close()
    assert not silent.step_ended(3)
    assert not silent.step_ended(4)
    assert len(caplog.messages) == 1
    closed.close()
    closed.decide(None)
    assert not closed.step_ended(3)
    assert len(caplog.messages) == 1


@pytest.fixture
def start() -> Iterator[Start]:
    started = list[RankExchange]()

    def start(size: int, put: Callable[[MergedStep], object] = print) -> RankExchange:
        started.append(exchange_of("run", 0, size, put))
        return started[0]

    yield start
    started[0].close(0.1)


def arrives(first: RankExchange, rank: int, kind: bytes = b"", payload: bytes = b"") -> None:
    """Deliver a frame of another rank to rank 0; without a kind it only shows a living rank."""
    first._submit(first._receive, kind, payload, rank)


def test_a_rank_that_does_not_answer_does_not_block_the_barrier(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "ANSWER_S", 0.1)
    first = start(2)
    arrives(first, 1)
    first.raise_on_all(ALERT)
    assert first.barrier._decided.wait(300)
    assert first.to_raise(0) == ALERT


def test_the_latest_step_of_all_connected_ranks_is_the_step_at_which_to_raise(
    start: Start,
) -> None:
    first = start(4)
    for rank in range(1, 4):
        arrives(first, rank)
    arrives(first, 3, ENDED)
    first.raise_on_all(ALERT)
    arrives(first, 1, BARRIER, b"6")
    arrives(first, 2, BARRIER, b"7")
    assert first.barrier._decided.wait(300)
    assert [first.to_raise(step) for step in (6, 7)] == [None, ALERT]


def test_merged_steps_above_the_byte_limit_are_dropped_and_logged_once(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    queued = list[MergedStep]()
    first, step = start(2, queued.append), MergedStep(measured(0, 0))
    step.nbytes = 10
    monkeypatch.setattr(exchange, "MAX_BYTES", 30)
    for _ in range(10):
        first.take(step)
    assert len(queued) == 4
    for _ in queued:
        first.note_recorded(step)
    first.take(step)
    assert len(queued) == 5
    assert caplog.text.count("is not recorded") == 1


def test_a_forked_child_does_not_block(start: Start) -> None:
    first = start(2)
    first.send_part(measured(0, 0))  # the other rank never sends its part
    child = os.fork()
    if child == 0:
        signal.alarm(300)
        first.close(1e6)
        first.wait(1e6)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0

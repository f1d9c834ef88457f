"""All ranks raise at the end of the same step, and no rank blocks forever."""

from __future__ import annotations

import threading

import pytest

from telemetry.ranks import collector, exchange
from telemetry.ranks.collector import Barrier
from telemetry.ranks.connection import BARRIER, ENDED
from telemetry.ranks.exchange import RankExchange
from tests.helpers.members import ALERT, exchange_of


def end_step(one: Barrier, step: int) -> tuple[threading.Thread, list[bool]]:
    """Start a training thread that ends a step."""
    raises: list[bool] = []
    thread = threading.Thread(target=lambda: raises.append(one.step_ended(step)))
    thread.start()
    return thread, raises


def test_a_waiting_rank_continues_to_the_step_of_another_rank() -> None:
    """A rank in a collective of step 11 needs the rank that waits at the end of step 10."""
    behind, ahead = Barrier(), Barrier()
    assert not behind.step_ended(9)
    assert not ahead.step_ended(10)
    stopped = behind.close()
    thread, raises = end_step(behind, 10)
    assert (stopped, ahead.close()) == (10, 11)
    assert thread.is_alive()
    behind.decide(11)
    ahead.decide(11)
    thread.join()
    assert raises == [False]
    assert behind.step_ended(11)
    assert ahead.step_ended(11)
    assert not ahead.step_ended(12), "once"


def test_a_rank_that_waits_at_the_decided_step_raises() -> None:
    own = Barrier(first_step=5)
    assert own.close() == 5
    thread, raises = end_step(own, 5)
    own.decide(5)
    thread.join()
    assert raises == [True]


def arrives(first: RankExchange, rank: int, kind: bytes = b"", payload: bytes = b"") -> None:
    """Deliver a frame of another rank to rank 0; without a kind it only shows a living rank."""
    first._submit(first._receive, kind, payload, rank)


def test_a_rank_that_does_not_answer_does_not_block_the_barrier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exchange, "ANSWER_S", 0.1)
    first = exchange_of("run", 0, 2)
    arrives(first, 1)
    first.raise_on_all(ALERT)
    assert first.barrier._decided.wait(30)
    assert first.to_raise(0) == ALERT
    first.close(0.1)


def test_the_latest_step_of_all_connected_ranks_is_the_step_at_which_to_raise() -> None:
    first = exchange_of("run", 0, 4)
    for rank in range(1, 4):
        arrives(first, rank)
    arrives(first, 3, ENDED)
    first.raise_on_all(ALERT)
    arrives(first, 1, BARRIER, b"6")
    arrives(first, 2, BARRIER, b"7")
    assert first.barrier._decided.wait(30)
    assert [first.to_raise(step) for step in (6, 7)] == [None, ALERT]
    first.close(0.1)


def test_a_rank_beyond_the_decided_step_raises_at_the_end_of_its_step() -> None:
    late = Barrier()
    assert not late.step_ended(20)
    late.close()
    late.decide(7)
    assert late.step_ended(21)


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


def test_an_alert_for_a_step_that_never_starts_is_raised_at_the_end() -> None:
    own = Barrier()
    assert not own.step_ended(None)
    assert not own.step_ended(3)
    own.close()
    own.decide(4)
    assert own.step_ended(None)
    assert not own.step_ended(None)

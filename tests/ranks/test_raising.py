"""All ranks raise at the end of the same step, and none waits for ever."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from telemetry.failures import Failures
from telemetry.ranks import channel, raising
from telemetry.ranks.channel import Channel
from telemetry.ranks.messages import END, Message, News
from telemetry.ranks.raising import Agreement


def ask(agreement: Agreement, step: int) -> tuple[threading.Thread, list[bool]]:
    """A training thread that ends a step."""
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(agreement.step_ended(step)))
    thread.start()
    return thread, answers


def test_a_rank_that_waits_goes_on_to_the_step_that_another_is_in() -> None:
    """The other is in a collective of step 11 and needs the one that waits at the end of 10."""
    behind, ahead = Agreement(), Agreement()
    assert not behind.step_ended(9)
    assert not ahead.step_ended(10)
    held = behind.hold()
    waiting, answers = ask(behind, 10)
    assert (held, ahead.hold()) == (10, 11)
    assert waiting.is_alive()
    behind.decide(11)
    ahead.decide(11)
    waiting.join()
    assert answers == [False]
    assert behind.step_ended(11)
    assert ahead.step_ended(11)
    assert not ahead.step_ended(12), "once"


def test_a_rank_that_ends_its_step_while_it_is_told_is_right_either_way() -> None:
    agreement = Agreement(first_step=5)
    assert agreement.hold() == 5
    waiting, answers = ask(agreement, 5)
    agreement.decide(5)
    waiting.join()
    assert answers == [True]


def test_the_dead_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "ANSWER_S", 0.1)
    heard: SimpleQueue[News] = SimpleQueue()
    first = Channel(
        name="run", rank=0, world_size=2, deliver=print, heard=heard.put, failures=Failures(),
        first_step=7,
    )  # fmt: skip
    first._give(lambda: first._take(Message(ranks=frozenset({1}))))
    first.raise_together("alert")
    assert heard.get(timeout=30).raise_at is None
    assert heard.get(timeout=30).raise_at == 7
    assert first.agreement.step_ended(7)
    first.close(0.1)


def test_all_who_are_there_are_asked_where_to_raise() -> None:
    heard: SimpleQueue[News] = SimpleQueue()
    first = Channel(
        name="run", rank=0, world_size=4, deliver=print, heard=heard.put, failures=Failures(),
    )  # fmt: skip

    def arrives(rank: int, held: int | None = None, places: tuple[int, ...] = ()) -> None:
        message = Message(ranks=frozenset({rank}), held=held, places=places)
        first._give(lambda: first._take(message))

    for rank in range(1, 4):
        arrives(rank)
    arrives(3, places=(END,))
    first.raise_together("alert")
    assert heard.get(timeout=30).raise_at is None
    arrives(1, held=7)
    arrives(2, held=6)
    assert heard.get(timeout=30).raise_at == 7
    first.close(0.1)


def test_who_comes_back_raises_at_once() -> None:
    late = Agreement()
    assert not late.step_ended(20)
    late.hold()
    late.decide(7)
    assert late.step_ended(21)


def test_training_goes_on_if_the_first_rank_goes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(raising, "HOLD_S", 0.01)
    silent, closed = Agreement(), Agreement()
    silent.hold()
    assert not silent.step_ended(3)
    assert not silent.step_ended(4)
    assert len(caplog.messages) == 1
    closed.hold()
    closed.decide(None)
    assert not closed.step_ended(3)
    assert len(caplog.messages) == 1


def test_what_is_decided_for_a_step_that_never_comes_is_raised_at_the_end() -> None:
    agreement = Agreement()
    assert not agreement.step_ended(None)
    assert not agreement.step_ended(3)
    agreement.hold()
    agreement.decide(4)
    assert agreement.step_ended(None)
    assert not agreement.step_ended(None)

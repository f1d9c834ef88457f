"""A writer that its user flushes, closes and reopens while a logger writes through it."""

from __future__ import annotations

import copy
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer import event_file_writer
from torch.utils import tensorboard

from telemetry.events import FileWriter, list_event_files, read_events, summaries
from telemetry.events.summary_writer import GivenWriter, SummaryWriter

WAIT_S = 20
BOTH = pytest.mark.parametrize("kind", [tensorboard.SummaryWriter, SummaryWriter])
Kind = Callable[..., tensorboard.SummaryWriter]


def give(
    writer: tensorboard.SummaryWriter, before: Callable[[bool], None] = lambda closing: None
) -> GivenWriter:
    return GivenWriter(writer, before)


def add(given: GivenWriter, *steps: int, flush: bool = False) -> None:
    for step in steps:
        given.write_values([summaries.scalar("ours", step)], step, 1.0 + step, flush=flush)


def steps_of(log_dir: Path, tag: str = "ours") -> list[list[int]]:
    """Steps with a value of this tag, of each event file, the latest last."""
    # By names, torch's tenth file of a second comes before its ninth.
    paths = sorted(list_event_files(log_dir), key=lambda path: path.stat().st_mtime_ns)
    return [
        [
            event.step
            for event in read_events(path)
            if any(v.tag == tag for v in event.summary.value)
        ]
        for path in paths
    ]


@BOTH
@pytest.mark.parametrize("name", ["flush", "close"])
def test_queued_events_are_written_when_the_writer_is_flushed_or_closed(
    tmp_path: Path, kind: Kind, name: str
) -> None:
    writer = kind(tmp_path)
    closed = []

    def before(closing: bool) -> None:
        closed.append(closing)
        add(given, 1, 2)

    given = give(writer, before)
    add(given, 0)
    getattr(writer, name)()
    assert steps_of(tmp_path) == [[0, 1, 2]]
    given.close()
    writer.close()
    assert steps_of(tmp_path) == [[0, 1, 2]]
    assert closed == [name == "close"]


@BOTH
def test_events_after_a_close_are_in_the_file_that_readers_read_next(
    tmp_path: Path, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of one second's files, torch's tenth sorts before its ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    writer = kind(tmp_path)
    given = give(writer)
    add(given, 0)
    writer.close()
    add(given, 1)
    given.flush()
    writer.add_scalar("theirs", 0.0, 2)
    add(given, 2)
    given.close()
    writer.close()
    by_name = [read_events(path) for path in list_event_files(tmp_path)]
    steps = [event.step for events in by_name for event in events if event.summary.value]
    assert sorted(steps) == steps == [0, 1, 2, 2]


@BOTH
def test_a_closed_writer_is_opened_again(tmp_path: Path, kind: Kind) -> None:
    writer = kind(tmp_path)
    writer.close()
    given = give(writer)
    add(given, 0)
    given.close()
    writer.close()
    assert steps_of(tmp_path) == [[], [0]]


@BOTH
def test_an_event_keeps_its_time_and_step(tmp_path: Path, kind: Kind) -> None:
    writer = kind(tmp_path)
    given = give(writer)
    add(given, 7)
    given.close()
    writer.close()
    [path] = list_event_files(tmp_path)
    [event] = [event for event in read_events(path) if event.summary.value]
    assert (event.step, event.wall_time, event.summary.value[0].tag) == (7, 8.0, "ours")


@BOTH
def test_no_event_is_lost_if_two_threads_find_the_writer_closed(tmp_path: Path, kind: Kind) -> None:
    writer = kind(tmp_path)
    given = give(writer)
    for step in range(20):
        writer.close()
        both_begin = threading.Barrier(2)

        def user(step: int = step, both_begin: threading.Barrier = both_begin) -> None:
            both_begin.wait(WAIT_S)
            writer.add_scalar("theirs", 0.0, step)

        thread = threading.Thread(target=user)
        thread.start()
        both_begin.wait(WAIT_S)
        add(given, step, flush=True)
        thread.join(WAIT_S)
        given.flush()
    given.close()
    writer.close()
    for tag in ("ours", "theirs"):
        assert sorted(step for steps in steps_of(tmp_path, tag) for step in steps) == list(
            range(20)
        )


class SlowToClose(tensorboard.SummaryWriter):
    """Writer that is closed, and reports so only after the test lets it continue."""

    def __init__(self, log_dir: Path) -> None:
        super().__init__(log_dir)
        self.entered, self.may_continue = threading.Event(), threading.Event()

    def close(self) -> None:
        self.file_writer.close()
        self.entered.set()
        assert self.may_continue.wait(WAIT_S)
        self.file_writer = self.all_writers = None


def test_events_added_while_torchs_writer_closes_are_in_the_next_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SlowToClose(tmp_path)
    given = give(writer)
    add(given, 0)
    closing = threading.Thread(target=writer.close)
    closing.start()
    assert writer.entered.wait(WAIT_S)
    add(given, 1)
    assert given.flush(WAIT_S)
    writer.may_continue.set()
    closing.join(WAIT_S)
    given.close()
    assert steps_of(tmp_path) == [[0], [1]]
    assert caplog.text == ""


class ClosedMeanwhile(SummaryWriter):
    """Writer that another thread closes right after it returned its file."""

    next_is_closed = False

    def _get_file_writer(self) -> FileWriter:
        file_writer = super()._get_file_writer()
        if self.next_is_closed:
            self.next_is_closed = False
            self.close()
        return file_writer


def test_events_added_while_the_writer_closes_are_in_the_next_file(tmp_path: Path) -> None:
    writer = ClosedMeanwhile(tmp_path)
    given = give(writer)
    add(given, 0)
    writer.next_is_closed = True
    add(given, 1)
    given.close()
    writer.close()
    assert steps_of(tmp_path) == [[0], [1]]


# --- the writer itself ---------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_the_last_logger_restores_the_writer(
    tmp_path: Path, kind: Kind, order: tuple[int, ...]
) -> None:
    writer = kind(tmp_path)
    writer.flush = own = writer.flush  # a user may replace it, too
    before = dict(vars(writer))
    all_given = [give(writer) for _ in range(3)]
    for at in order[:2]:
        all_given[at].close()
    add(all_given[order[2]], 5)
    writer.flush()
    assert steps_of(tmp_path) == [[5]]
    all_given[order[2]].close()
    assert vars(writer) == before
    assert writer.flush is own
    writer.close()


@BOTH
def test_a_method_that_was_replaced_later_stays_replaced(tmp_path: Path, kind: Kind) -> None:
    writer = kind(tmp_path)
    given = give(writer)
    calls, ours = [], writer.flush

    def theirs() -> None:
        calls.append("flush")
        ours()

    writer.flush = theirs
    given.close()
    writer.flush()
    again = give(writer)
    add(again, 3)
    writer.flush()
    assert steps_of(tmp_path) == [[3]]
    again.close()
    assert writer.flush is theirs
    assert calls == ["flush", "flush"]
    writer.close()


@pytest.mark.parametrize("make", [copy.deepcopy, lambda writer: pickle.loads(pickle.dumps(writer))])
def test_a_copy_of_the_writer_has_separate_methods(
    tmp_path: Path, make: Callable[[Any], Any]
) -> None:
    writer = SummaryWriter(tmp_path)
    called = threading.Event()
    given = give(writer, lambda closing: called.set())
    twin = make(writer)
    twin.flush()
    twin.close()
    assert not twin._get_file_writer().is_here
    assert not called.is_set()
    assert writer.file_writer.is_here
    given.close()
    writer.close()


# --- no thread waits forever for another ----------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@BOTH
def test_a_forked_child_is_not_blocked(tmp_path: Path, kind: Kind) -> None:
    writer = kind(tmp_path)
    given = give(writer)
    writer.close()
    add(given, 0)
    given.flush()
    child = os.fork()
    if child == 0:
        add(given, 1)
        writer.add_scalar("theirs", 1.0, 0)
        given.flush()
        given.close()
        os._exit(7)
    deadline = time.monotonic() + WAIT_S
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if done[0] == 0:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(done[1]) == 7
    given.close()
    writer.close()
    assert steps_of(tmp_path)[1] == [0]


class HangingWriter(tensorboard.SummaryWriter):
    """Writer that blocks its callers, like torch's writer on a hanging disk."""

    answering = threading.Event()
    file_writer: Any

    def _get_file_writer(self) -> Any:
        self.file_writer = self
        return self

    def add_event(self, event: Event, step: int | None, walltime: float | None) -> None:
        assert self.answering.wait(WAIT_S)


def test_a_hanging_writer_blocks_no_thread_and_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = HangingWriter(tmp_path)
    given = give(writer)
    add(given, *range(100), flush=True)
    assert not given.flush(0.05)
    given.close(0.05)
    HangingWriter.answering.set()
    assert "s ago has not ended" in caplog.text
    assert given._background is not None
    given._background._thread.join(WAIT_S)


def test_events_that_a_failing_writer_refused_are_in_another_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class FailingWriter(tensorboard.SummaryWriter):
        def _get_file_writer(self) -> Any:
            self.file_writer = self
            return self

        def add_event(self, event: Event, step: int | None, walltime: float | None) -> None:
            raise OSError("no space left on device")

    given = give(FailingWriter(tmp_path))
    add(given, *range(3))
    given.close()
    assert steps_of(tmp_path) == [[0, 1, 2]]
    again = give(FailingWriter(tmp_path / "file"))
    (tmp_path / "file").touch()  # before the thread checks the directory
    add(again, *range(3))
    again.close()
    assert "3 events could not be written" in caplog.text

"""A writer of torch that its user flushes, closes and reopens while a logger writes through it."""

from __future__ import annotations

import logging
import shutil
import threading
from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tensorboard.compat.proto.event_pb2 import Event
from torch.utils.tensorboard import SummaryWriter

import telemetry
from tests.helpers.board import Board, open_slow
from tests.helpers.shell import records
from tests.helpers.tiny_run import TinyRun, event_files, events_of, steps_by_file, whole_run

HANGS_S = 120  # a watchdog; decides no test


def all_steps(log_dir: Path, tag: str = "count") -> list[int]:
    return sorted(chain(*steps_by_file(log_dir, tag)))


def test_the_writer_is_left_as_it_is(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    before = dict(vars(writer))
    with closing(TinyRun(writer).logger):
        assert vars(writer) == before
    writer.close()


def step_after_a_close(log_dir: Path) -> tuple[SummaryWriter, TinyRun]:
    writer = SummaryWriter(log_dir)
    run = TinyRun(writer)
    run.train()
    run.logger.flush()
    writer.close()
    run.train()
    return writer, run


def test_steps_after_a_close_are_in_the_file_that_readers_read_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    writer, run = step_after_a_close(tmp_path)
    run.logger.flush()
    writer.add_scalar("theirs", 0.0, 2)
    run.train()
    run.logger.close()
    writer.close()
    assert [steps for steps in steps_by_file(tmp_path) if steps] == [[0], [1, 2]]
    shown = Board(open_slow(tmp_path)).scalars()["."]
    assert [step for step, _ in shown["count"]] == [0, 1, 2]
    assert shown["theirs"] == [(2, 0.0)]
    [reported] = [message for message in caplog.messages if "given SummaryWriter" in message]
    assert "a new file in its directory continues" in reported


def test_a_file_of_ours_after_a_close_can_be_read_alone(tmp_path: Path) -> None:
    _, run = step_after_a_close(tmp_path)
    run.logger.close()
    event_files(tmp_path)[0].unlink()
    curves = telemetry.read(tmp_path).scalars
    assert set(curves[curves.tag == "grad_norm/total"].step) == {1}


def test_a_closed_writer_is_continued_in_a_new_file_and_stays_open(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    writer.close()
    whole_run(writer)
    writer.add_scalar("theirs", 0.0, 5)
    writer.close()
    assert [steps for steps in steps_by_file(tmp_path) if steps] == [[0]]
    assert all_steps(tmp_path, "theirs") == [5]
    [listed] = records("runs", tmp_path)
    assert listed["status"] == "ended"


def test_events_have_the_time_and_step_of_their_end(tmp_path: Path) -> None:
    records: list[tuple[int, float]] = []
    writer = SummaryWriter(tmp_path)
    whole_run(writer, 3, alerts=[lambda r: records.append((r.step, r.wall_time)) or ()])
    writer.close()
    [path] = event_files(tmp_path)
    tag = "~run/grad_norm/total"
    found = [e for e in events_of(path) if any(v.tag == tag for v in e.summary.value)]
    assert [(event.step, event.wall_time) for event in found] == records


def test_no_event_is_lost_if_two_threads_find_the_writer_closed(tmp_path: Path) -> None:
    writer = SummaryWriter(tmp_path)
    run = TinyRun(writer)
    for step in range(20):
        writer.close()
        both_begin = threading.Barrier(2)

        def user(step: int = step, both_begin: threading.Barrier = both_begin) -> None:
            both_begin.wait(HANGS_S)
            writer.add_scalar("theirs", 0.0, step)

        thread = threading.Thread(target=user)
        thread.start()
        both_begin.wait(HANGS_S)
        run.train()
        run.logger.flush()
        thread.join(HANGS_S)
    run.logger.close()
    writer.close()
    for tag in ("count", "theirs"):
        assert all_steps(tmp_path, tag) == list(range(20))


class OtherFile:
    """File of a writer that hangs until the test lets it continue, or whose disk is full."""

    def __init__(self, error: OSError | None = None) -> None:
        self.error, self.answering = error, threading.Event()

    def add_event(self, event: Event, step: int | None, walltime: float | None) -> None:
        if self.error is not None:
            raise self.error
        assert self.answering.wait(HANGS_S)

    def flush(self) -> None: ...


def writer_to(log_dir: Path, file: OtherFile) -> SummaryWriter:
    writer: Any = SummaryWriter(log_dir)
    writer.close()
    writer.file_writer, writer.all_writers = file, {str(log_dir): file}
    return writer


def test_a_hanging_writer_does_not_block_training(tmp_path: Path) -> None:
    file = OtherFile()
    run = TinyRun(writer_to(tmp_path, file))
    run.train(100)  # would never end
    file.answering.set()
    run.logger.close()


def test_steps_that_a_failing_writer_refused_are_in_another_file_or_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = OtherFile(OSError("no space left on device"))
    whole_run(writer_to(tmp_path / "run", full), 3)
    assert all_steps(tmp_path / "run") == [0, 1, 2]
    again = TinyRun(writer_to(tmp_path / "again", full))
    shutil.rmtree(tmp_path / "again")
    (tmp_path / "again").touch()
    again.train(3)
    again.logger.close()
    assert "events could not be written" in caplog.text

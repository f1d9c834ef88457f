"""Directories and disks that vanish, are full, hang, or are not writable, while a run trains."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import SessionLog
from torch.utils.tensorboard import SummaryWriter

import telemetry
from tests.helpers.board import ReadBoard
from tests.helpers.disks import FreezableDisk, fill
from tests.helpers.known_runs import alert_at
from tests.helpers.members import until
from tests.helpers.scripts import run_script
from tests.helpers.tiny_run import (
    TinyRun,
    event_files,
    events_of,
    norm_steps,
    steps_by_file,
    steps_of,
)


def shown_steps(board_dir: Path, read_board: ReadBoard) -> list[int]:
    return [step for step, _ in read_board(board_dir).scalars()["run"]["count"]]


# --- one file after another ----------------------------------------------------------------------


def test_a_file_is_there_before_the_first_step_and_begins_with_its_version_and_a_session(
    tmp_path: Path,
) -> None:
    run = TinyRun(tmp_path / "new" / "run")
    [path] = event_files(tmp_path / "new" / "run")
    version, start = events_of(path)
    run.logger.close()
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START


def test_later_sessions_hide_nothing_and_sort_last_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_board: ReadBoard
) -> None:
    run, clock = tmp_path / "run", time.time
    run.mkdir()
    (run / "events.out.tfevents.1900000000.host.123.0").touch()
    (run / "events.out.tfevents.hand-made").touch()
    for number, shift in enumerate([0, 0.5, -1e8, 1e8, -1e9]):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda shift=shift: clock() + shift)
            session = TinyRun(run, first_step=3 * number)
            session.train(3)
            session.logger.close()
    assert shown_steps(tmp_path, read_board) == list(range(15))
    ours = [steps for steps in steps_by_file(run) if steps]
    assert ours == [[step, step + 1, step + 2] for step in range(0, 15, 3)]
    assert re.search(r"tfevents\.1900000001\.", event_files(run)[1].name)


@pytest.mark.parametrize("cut", [1, 11, 13, 30])
def test_a_torn_file_does_not_hide_the_next_file(
    tmp_path: Path, read_board: ReadBoard, cut: int
) -> None:
    run = TinyRun(tmp_path / "run")
    run.train(2)
    run.logger.close()
    [path] = event_files(tmp_path / "run")
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - cut)
    resumed = TinyRun(tmp_path / "run", first_step=2)
    resumed.train(2)
    resumed.logger.close()
    assert shown_steps(tmp_path, read_board) == [0, 1, 2, 3]
    assert norm_steps(tmp_path / "run") == [0, 1, 2, 3]


# --- a directory that vanishes -------------------------------------------------------------------


def test_a_removed_directory_is_made_again_and_its_files_can_be_read_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = [lambda record: [alert_at(3, None)] if record.step == 3 else []]
    run = TinyRun(tmp_path / "run", alerts=rules)
    run.logger.hparams({"lr": 0.01})
    run.train(2)
    run.logger.flush()
    shutil.rmtree(tmp_path / "run")
    run.logger.flush()
    assert not (tmp_path / "run").exists()  # not before there is something to write
    run.train(2)
    run.logger.close()
    assert steps_by_file(tmp_path / "run") == [[2, 3]]
    assert norm_steps(tmp_path / "run")[-2:] == [2, 3]
    found = telemetry.read(tmp_path / "run")
    assert found.hparams == {"lr": 0.01}
    assert [alert.step for alert in found.alerts] == [3]
    ours = [message for message in caplog.messages if "The gradient grew" not in message]
    assert len(ours) == 2, "the event file and the run log"
    assert all("was removed; continuing in a new file" in message for message in ours)


def test_a_moved_directory_is_still_written(tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run")
    run.train()
    run.logger.flush()
    (tmp_path / "run").rename(tmp_path / "renamed")
    run.train()
    run.logger.close()
    assert steps_by_file(tmp_path / "renamed") == [[0, 1]]


def test_a_file_whose_status_cannot_be_read_is_followed_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = TinyRun(tmp_path)
    run.train()
    run.logger.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", stale)  # as of a file that was removed from an NFS server
        run.train()
        run.logger.flush()
    run.logger.close()
    assert steps_by_file(tmp_path) == [[0], [1]]


def stale(*_: object) -> None:
    raise OSError("stale")


# --- full disks ----------------------------------------------------------------------------------


def test_steps_that_a_full_disk_refused_follow_when_there_is_room(
    tiny_disk: Path, read_board: ReadBoard, caplog: pytest.LogCaptureFixture
) -> None:
    """A step that was cut is completed where it was cut, and each change is logged once."""
    log_dir, ballast = tiny_disk / "logs" / "run", tiny_disk / "ballast"
    ballast.write_bytes(bytes(100_000))
    run = TinyRun(log_dir)
    long_name = {"x" * 600: 1.0}
    for _ in range(60):
        run.train(1, **long_name)
    run.logger.flush()
    # A file that is made and removed would stop TensorBoard's slow loader.
    changed = log_dir.stat().st_mtime_ns
    run.train(10)
    run.logger.flush()
    assert log_dir.stat().st_mtime_ns == changed
    [first] = event_files(log_dir)
    written = steps_of(first)
    assert 0 < len(written) < 60
    ballast.unlink()
    run.logger.flush()
    run.train()
    run.logger.close()
    assert steps_by_file(log_dir) == [list(range(71))]
    assert shown_steps(tiny_disk / "logs", read_board) == list(range(71))
    assert norm_steps(log_dir) == list(range(71))
    [reported] = caplog.messages
    assert "No space left on device" in reported


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # torch's
def test_a_given_writer_that_a_full_disk_stopped_is_continued_when_there_is_room(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = SummaryWriter(tiny_disk / "run")
    run = TinyRun(writer)
    run.train(2)
    run.logger.flush()
    ballast = fill(tiny_disk)
    for _ in range(5):  # torch accepts some of them, and loses them
        run.train(1, **{"x" * 12_000: 1.0})
        run.logger.flush()
    ballast.unlink()
    run.logger.flush()
    run.train(2)
    run.logger.close()
    theirs, ours = sorted(steps for steps in steps_by_file(tiny_disk / "run") if steps)
    assert theirs[:2] == [0, 1]
    assert ours == list(range(ours[0], 9))
    assert ours[0] < 7
    assert any("takes no more events" in message for message in caplog.messages)


def test_a_full_disk_gets_no_empty_files(tiny_disk: Path) -> None:
    run = TinyRun(tiny_disk / "run")
    run.train()
    run.logger.flush()
    ballast = fill(tiny_disk)
    room = 4096 * 2  # for a name and a header, perhaps, but not for the step
    for _ in range(5):
        run.train(1, **{"x" * 12_000: 1.0})
        os.truncate(ballast, ballast.stat().st_size - room)
        for _ in range(3):
            run.logger.flush()
        fill(tiny_disk)
    for path in event_files(tiny_disk / "run"):
        assert any(event.summary.value for event in events_of(path))
    ballast.unlink()
    run.logger.close()
    assert list(itertools.chain(*steps_by_file(tiny_disk / "run"))) == list(range(6))


def test_steps_that_were_never_written_are_counted(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = TinyRun(tiny_disk / "run")
    run.train()
    run.logger.flush()
    fill(tiny_disk)
    run.train(200, **{"x" * 2000: 1.0})
    run.logger.close()
    [written] = steps_by_file(tiny_disk / "run")
    assert written == list(range(len(written)))
    assert len(written) < 100
    found = re.search(r"(\d+) events could not be written \(.*No space left", caplog.messages[-1])
    assert found is not None
    assert int(found[1]) >= 200


def test_a_file_size_limit_leads_to_more_files(tmp_path: Path) -> None:
    """With a flush after each step, or none before the end."""
    run_script(
        tmp_path,
        """
        import resource, sys
        from tests.helpers.tiny_run import TinyRun
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        for name in ("flushed", "at once"):
            run = TinyRun(f"{sys.argv[1]}/{name}")
            for step in range(100):
                run.train(1, **{"x" * 1000: 1.0})
                if name == "flushed":
                    run.logger.flush()
            run.logger.close()
        """,
        tmp_path,
    )
    for name in ("flushed", "at once"):
        steps = steps_by_file(tmp_path / name)
        assert len(steps) > 2
        assert list(itertools.chain(*steps)) == list(range(100))
        assert norm_steps(tmp_path / name) == list(range(100))


# --- disks that hang, directories without permission ---------------------------------------------


def test_a_hanging_disk_blocks_neither_training_nor_alerts(freezable_disk: FreezableDisk) -> None:
    log_dir = freezable_disk.path / "run"
    run = TinyRun(log_dir, alerts=[lambda record: [alert_at(record.step, None)]])
    run.train()
    run.logger.flush()
    with freezable_disk.frozen():
        run.train(100)  # would never end
        until(lambda: len(run.logger.alerts) == 101)
    run.logger.close()
    found = telemetry.read(log_dir)
    assert ([alert.step for alert in found.alerts], found.problems) == ([*range(101)], ())
    assert steps_by_file(log_dir) == [[*range(101)]]


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="no users to change to")
def test_a_directory_made_read_only_is_still_written_and_retried(world_writable: Path) -> None:
    _, log = run_script(
        world_writable,
        """
        import os, shutil, sys
        from pathlib import Path
        from tests.helpers.tiny_run import TinyRun, event_files, steps_by_file
        first = TinyRun(Path(sys.argv[1]).parent / "first")
        first.train()  # imports what a step imports, which another user cannot
        first.logger.close()
        if os.getuid() == 0:
            os.setuid(65534)  # nobody: permissions do not bind root

        def train(steps=1):
            run.train(steps)
            run.logger.flush()

        log_dir = Path(sys.argv[1])
        run = TinyRun(log_dir)
        train()
        log_dir.chmod(0o555)
        train()  # into the file that is open
        assert steps_by_file(log_dir) == [[0, 1]]
        log_dir.chmod(0o777)
        shutil.rmtree(log_dir)
        log_dir.mkdir(0o555)
        train(2)  # needs a new file
        train()
        assert event_files(log_dir) == []
        log_dir.chmod(0o777)
        train()
        run.logger.close()
        """,
        world_writable / "run",
    )
    assert steps_by_file(world_writable / "run") == [[2, 3, 4, 5]]
    assert log.count("cannot be written for now: [Errno 13]") == 1


@pytest.fixture
def world_writable() -> Iterator[Path]:
    """A directory that another user may write to; those of pytest are for their owner only."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from tensorboard.compat.proto.event_pb2 import SessionLog

from telemetry.events import list_event_files, local_files, read_events, summaries
from telemetry.events.local_files import LocalFiles
from tests.helpers.board import ReadBoard
from tests.helpers.disks import fill
from tests.helpers.scripts import run_script


def record(step: int, tag: str = "loss") -> bytes:
    return summaries.event_of([summaries.scalar(tag, step)], step, 1.0)


def write(files: LocalFiles, *records: bytes) -> None:
    waiting = deque(records)
    files.write(waiting)
    assert not waiting


def steps_in(path: Path) -> list[int]:
    """The steps of one file's summaries; its tail must not be torn."""
    reader = read_events(path)
    steps = [event.step for event in reader if event.HasField("summary")]
    assert reader.torn_at is None
    return steps


def test_every_file_begins_with_its_version_and_a_session(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path / "new" / "run"), ".suffix")

    write(files, record(3))
    files.close()

    (path,) = list_event_files(tmp_path / "new" / "run")
    version, start, summary = read_events(path)
    assert version.file_version == "brain.Event:2"
    assert start.session_log.status == SessionLog.START
    assert summary.step == 3
    assert path.name.endswith(".suffix")


def test_a_new_session_hides_no_earlier_record(tmp_path: Path, read_board: ReadBoard) -> None:
    for step in range(3):
        files = LocalFiles(str(tmp_path / "run"))
        write(files, record(step), record(2**62 + step, "other"))
        files.close()

    shown = read_board(tmp_path).scalars()["run"]

    assert shown["loss"] == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert [step for step, _ in shown["other"]] == [2**62, 2**62 + 1, 2**62 + 2]


def test_a_file_exists_before_the_first_record(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))

    write(files)
    write(files)

    assert len(list_event_files(tmp_path)) == 1
    files.close()


def test_files_sort_in_the_order_of_writing_when_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step, now in enumerate([1700000000.0, 1700000000.9, 1600000000.0, 1800000000.0, 0.0]):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        files = LocalFiles(str(tmp_path))
        write(files, record(step))
        files.close()

    assert [steps_in(path) for path in list_event_files(tmp_path)] == [[0], [1], [2], [3], [4]]


def test_files_sort_behind_those_of_other_writers(tmp_path: Path) -> None:
    older = tmp_path / "events.out.tfevents.2000000000.host.123.0"
    older.touch()
    (tmp_path / "events.out.tfevents.hand-made").touch()
    files = LocalFiles(str(tmp_path), names_elsewhere=lambda: ["a/b.tfevents.2000000007.host.1.0"])

    write(files, record(0))

    assert files.path is not None
    assert Path(files.path).name.startswith("events.out.tfevents.2000000008.")
    files.close()


def test_writers_that_start_at_once_get_separate_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_board: ReadBoard
) -> None:
    # As in containers that share a host name, and whose process ids are all 1.
    monkeypatch.setattr(local_files, "_file_numbers", itertools.repeat(0))
    barrier = threading.Barrier(8)
    writers = [LocalFiles(str(tmp_path / "run")) for _ in range(8)]

    def start(number: int) -> None:
        barrier.wait()
        write(writers[number], record(7, f"writer/{number}"))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for files in writers:
        files.close()

    assert len(list_event_files(tmp_path / "run")) == 8
    shown = read_board(tmp_path).scalars()["run"]
    assert shown == {f"writer/{number}": [(7, 7.0)] for number in range(8)}


def test_a_removed_directory_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    files = LocalFiles(str(run))
    write(files, record(0))

    shutil.rmtree(run)
    write(files)
    assert not run.exists()  # not before there is something to write
    write(files, record(1))
    write(files, record(2))
    files.close()

    (path,) = list_event_files(run)
    assert steps_in(path) == [1, 2]
    (reported,) = caplog.messages
    assert "was removed; continuing in a new event file" in reported


def test_a_moved_directory_is_still_written(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path / "run"))
    write(files, record(0))

    (tmp_path / "run").rename(tmp_path / "renamed")
    write(files, record(1))
    files.close()

    (path,) = list_event_files(tmp_path / "renamed")
    assert steps_in(path) == [0, 1]


def test_a_file_whose_status_cannot_be_read_is_followed_by_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = LocalFiles(str(tmp_path))
    write(files, record(0))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", fail)  # as of a file that was removed from an NFS server
        with pytest.raises(OSError, match="stale"):
            files.write(deque([record(1)]))
    write(files, record(1))
    files.close()

    assert [steps_in(path) for path in list_event_files(tmp_path)] == [[0], [1]]


def test_an_error_on_closing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NetworkFile(FileIO):
        def close(self) -> None:
            super().close()
            fail()

    monkeypatch.setattr(local_files, "FileIO", NetworkFile)
    files = LocalFiles(str(tmp_path))
    write(files, record(0))

    files.close()

    (reported,) = caplog.messages
    assert "may lack its end: stale" in reported


def fail(*_: object) -> None:
    raise OSError("stale")


def test_a_large_file_is_followed_by_another(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path), max_file_bytes=200)

    for step in range(9):
        write(files, record(step))
    files.close()

    steps = [steps_in(path) for path in list_event_files(tmp_path)]
    assert len(steps) > 1
    assert list(itertools.chain(*steps)) == list(range(9))


def test_records_larger_than_a_chunk_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files, "_CHUNK_BYTES", 100)
    files = LocalFiles(str(tmp_path))

    write(files, *[record(step, tag="x" * 60) for step in range(50)])
    files.close()

    assert steps_in(list_event_files(tmp_path)[0]) == list(range(50))


def test_records_that_a_full_disk_refused_follow_in_a_new_file(
    tiny_disk: Path, read_board: ReadBoard
) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(90_000))
    run = tiny_disk / "logs" / "run"
    files = LocalFiles(str(run))
    waiting = deque(record(step, tag="x" * 1000) for step in range(50))

    for _ in range(3):
        with pytest.raises(OSError, match="No space left"):
            files.write(waiting)
    (first,) = list_event_files(run)  # failed attempts leave nothing behind
    written = steps_in(first)
    assert 0 < len(written) < 50
    assert len(waiting) == 50 - len(written)

    ballast.unlink()
    write(files, *waiting)
    files.close()

    assert [steps_in(path) for path in list_event_files(run)] == [
        written,
        list(range(len(written), 50)),
    ]
    (points,) = read_board(tiny_disk / "logs").scalars()["run"].values()
    assert [step for step, _ in points] == list(range(50))


@pytest.fixture
def nearly_full(tiny_disk: Path) -> Path:
    """A disk with room for about 40 kB, the rest is taken by a file named ``ballast``."""
    (tiny_disk / "ballast").write_bytes(bytes(80_000))
    return tiny_disk


def test_a_full_disk_gets_no_empty_files(tiny_disk: Path) -> None:
    files = LocalFiles(str(tiny_disk / "run"))
    write(files, record(0))
    ballast = fill(tiny_disk)
    room = 4096 * 2  # for a name and a header, perhaps, but not for the record
    waiting = deque([record(1, "x" * 20_000)])

    for _ in range(5):
        os.truncate(ballast, ballast.stat().st_size - room)
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                files.write(waiting)
        fill(tiny_disk)
    files.close()

    assert [steps_in(path) for path in list_event_files(tiny_disk / "run")] == [[0]]


def test_later_files_begin_with_the_repeated_records(nearly_full: Path) -> None:
    layout = record(3, "layout")
    repeated = [layout]
    files = LocalFiles(str(nearly_full / "run"), repeated=repeated)
    write(files, layout, record(4))

    shutil.rmtree(nearly_full / "run")
    write(files, record(5))
    repeated.append(record(6, "x" * 80_000))  # is written when there is room
    shutil.rmtree(nearly_full / "run")
    waiting = deque([record(7)])
    with pytest.raises(OSError, match="No space left"):
        files.write(waiting)
    assert len(waiting) == 1
    (nearly_full / "ballast").unlink()
    write(files, *waiting)
    files.close()

    steps = [steps_in(path) for path in list_event_files(nearly_full / "run")]
    assert list(itertools.chain(*steps)) == [3, 3, 6, 7]


@pytest.mark.parametrize("steps_per_flush", [1, 1000])
def test_a_file_size_limit_leads_to_more_files(tmp_path: Path, steps_per_flush: int) -> None:
    run_script(
        tmp_path,
        """
        import resource, sys
        from telemetry.events import FileWriter, summaries
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        writer = FileWriter(sys.argv[1])
        for step in range(100):
            writer.write_values([summaries.scalar("x" * 1000, step)], step)
            if (step + 1) % int(sys.argv[2]) == 0:
                writer.flush()
        writer.close()
        assert writer.lost_count == 0
        """,
        tmp_path / "run",
        steps_per_flush,
    )

    steps = [steps_in(path) for path in list_event_files(tmp_path / "run")]
    assert len(steps) > 4
    assert list(itertools.chain(*steps)) == list(range(100))


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="no users to change to")
def test_a_directory_made_read_only_is_still_written_and_retried(
    world_writable: Path,
) -> None:
    run_script(
        world_writable,
        """
        import os, shutil, sys
        from telemetry.events import FileWriter, list_event_files, summaries
        if os.getuid() == 0:
            os.setuid(65534)  # nobody: permissions do not bind root

        def add(*steps):
            for step in steps:
                writer.write_values([summaries.scalar("loss", step)], step)
            writer.flush()

        run = sys.argv[1]
        writer = FileWriter(run)
        add(0)
        os.chmod(run, 0o555)
        add(1)  # into the file that is open
        assert writer.failure is None
        os.chmod(run, 0o777)
        shutil.move(list_event_files(run)[0], os.path.dirname(run))
        shutil.rmtree(run)
        os.remove(list_event_files(os.path.dirname(run))[0])
        os.mkdir(run, 0o555)
        add(2, 3)  # needs a new file
        add(4)
        assert isinstance(writer.failure, PermissionError), writer.failure
        os.chmod(run, 0o777)
        add(5)
        assert writer.failure is None
        writer.close()
        assert writer.lost_count == 0
        """,
        world_writable / "run",
    )

    (path,) = list_event_files(world_writable / "run")
    assert steps_in(path) == [2, 3, 4, 5]


@pytest.fixture
def world_writable() -> Iterator[Path]:
    """A directory that another user may write to; those of pytest are for their owner only."""
    directory = Path(tempfile.mkdtemp())
    directory.chmod(0o777)
    yield directory
    shutil.rmtree(directory)


@pytest.mark.parametrize("cut", [1, 5, 11, 12, 13, 30])
def test_a_torn_file_does_not_hide_the_next_file(
    tmp_path: Path, read_board: ReadBoard, cut: int
) -> None:
    files = LocalFiles(str(tmp_path / "run"))
    write(files, record(0), record(1))
    files.close()
    (path,) = list_event_files(tmp_path / "run")
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - cut)
    files = LocalFiles(str(tmp_path / "run"))
    write(files, record(2))
    files.close()

    points = read_board(tmp_path).scalars()["run"]["loss"]

    assert [step for step, _ in points] == [0, 2]
    assert read_tail(path) is not None


def read_tail(path: Path) -> int | None:
    reader = read_events(path)
    list(reader)
    return reader.torn_at

from __future__ import annotations

import itertools
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from telemetry.events import FileWriter, read_events, remote_files, summaries
from telemetry.events.remote_files import RemoteFiles
from telemetry.events.summary_writer import SummaryWriter


class Store:
    """Store of fsspec in memory, which can be unavailable."""

    def __init__(self) -> None:
        self.fs = fsspec.filesystem("memory")

    def steps(self) -> list[list[int]]:
        """Return the steps in each file of ``memory://logs/run``, in the order of names."""
        return [self._read(name) for name in sorted(self.fs.find("/logs/run"))]

    @contextmanager
    def unavailable(self) -> Iterator[None]:
        """Run the body while all calls of the store fail."""

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError(
                "the store is unavailable"
            )  # not an OSError, because each store has its own errors

        with pytest.MonkeyPatch.context() as patch:
            for method in ("ls", "makedirs", "put_file"):
                patch.setattr(MemoryFileSystem, method, fail)
            yield

    def _read(self, name: str) -> list[int]:
        with tempfile.NamedTemporaryFile() as copy:
            self.fs.get_file(name, copy.name)
            return [event.step for event in read_events(copy.name) if event.HasField("summary")]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """An empty store; local copies are made below ``tmp_path``."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = Store()
    yield store
    store.fs.rm("/logs", recursive=True)


def record(step: int) -> bytes:
    return summaries.event_of([summaries.scalar("loss", step)], step, 1.0)


def write(files: RemoteFiles, *steps: int, urgent: bool = False) -> None:
    queued = deque(map(record, steps))
    try:
        files.write(queued, urgent=urgent)
    finally:
        assert not queued


def test_tensorboard_reads_a_run_in_memory(store: Store) -> None:
    with SummaryWriter("memory://logs/run") as writer:
        writer.add_scalar("loss", 0.5, 3)
        writer.flush()
        first = EventAccumulator("memory://logs/run").Reload().Scalars("loss")
        writer.add_scalar("loss", 0.25, 4)

    second = EventAccumulator("memory://logs/run").Reload().Scalars("loss")

    assert [(event.step, event.value) for event in first] == [(3, 0.5)]
    assert [(event.step, event.value) for event in second] == [(3, 0.5), (4, 0.25)]


def test_a_file_is_uploaded_again_when_it_has_grown(store: Store) -> None:
    files = RemoteFiles("memory://logs/run")

    write(files, 0, 1, urgent=True)
    assert store.steps() == [[0, 1]]
    write(files, 2, urgent=True)
    assert store.steps() == [[0, 1, 2]]
    files.close()


def test_uploads_are_some_seconds_apart(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(remote_files.time, "monotonic", lambda: now)
    files = RemoteFiles("memory://logs/run")

    write(files, 0)
    write(files, 1)
    assert store.steps() == [[0]]
    now += remote_files._SYNC_S
    write(files)
    assert store.steps() == [[0, 1]]
    files.close()


def test_uploaded_files_are_removed_from_the_local_disk(store: Store, tmp_path: Path) -> None:
    files = RemoteFiles("memory://logs/run")
    write(files, 0)

    files.close()

    assert list(tmp_path.iterdir()) == []


def test_a_large_file_is_followed_by_a_new_one(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_MAX_FILE_BYTES", 200)
    files = RemoteFiles("memory://logs/run")

    for step in range(9):
        write(files, step, urgent=True)
        (spool,) = tmp_path.glob("telemetry-events-*")
        assert len(list(spool.iterdir())) == 1

    files.close()
    steps = store.steps()
    assert len(steps) > 1
    assert list(itertools.chain(*steps)) == list(range(9))


def test_every_later_file_starts_with_the_repeated_values(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_files, "_MAX_FILE_BYTES", 200)
    files = RemoteFiles("memory://logs/run", repeated=[record(100)] * 5)  # too large by themselves

    for step in range(9):
        write(files, step, urgent=True)
    files.close()

    first, *later = store.steps()
    assert 1 < len(later) < 8
    assert [steps[:5] for steps in later] == [[100] * 5] * len(later)
    assert first + [step for steps in later for step in steps[5:]] == list(range(9))


def test_a_resumed_run_sorts_behind_the_earlier_files(store: Store) -> None:
    earlier = "/logs/run/events.out.tfevents.2000000000.host.1.0"
    store.fs.pipe_file(earlier, b"")
    files = RemoteFiles("memory://logs/run")

    write(files, 5)
    files.close()

    assert store.steps() == [[], [5]]


def test_a_temporarily_unavailable_store_loses_nothing(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with store.unavailable():
        writer = FileWriter("memory://logs/run")
        for step in range(3):
            writer.write_values([summaries.scalar("loss", step)], step)
            writer.flush()
        assert "the store is unavailable" in str(writer.failure)
    writer.flush()
    assert store.steps() == [[0, 1, 2]]
    with store.unavailable():
        writer.write_values([summaries.scalar("loss", 3)], 3)
        writer.flush()
    writer.close()

    assert store.steps() == [[0, 1, 2, 3]]
    assert writer.lost_count == 0
    assert len(caplog.messages) == 2  # one for each absence


def test_files_that_were_not_uploaded_stay_on_the_local_disk(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = FileWriter("memory://logs/run")
    writer.flush()
    with store.unavailable():
        writer.write_values([summaries.scalar("loss", 3)], 3)
        writer.close()

    (spool,) = tmp_path.glob("telemetry-events-*")
    (path,) = spool.iterdir()
    assert [event.step for event in read_events(path)][-1] == 3
    assert str(spool) in caplog.messages[-1]

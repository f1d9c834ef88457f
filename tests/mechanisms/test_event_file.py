"""Event files of one writer: their names, and the errors of network drives."""

from __future__ import annotations

import errno
import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from io import FileIO
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.events import files, summaries
from telemetry.events.files import EventFile
from tests.helpers.tiny_run import event_files, steps_by_file


def event(step: int, tag: str = "count") -> bytes:
    return summaries.event_of([summaries.scalar(tag, step)], step, 1.0)


def write(file: EventFile, *events: bytes) -> None:
    waiting = deque(events)
    file.append(waiting)
    assert not waiting


def test_writers_whose_names_are_equal_have_separate_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in containers that share a host name, and whose process ids are all 1.
    monkeypatch.setattr(files, "_file_numbers", itertools.chain([0] * 8, itertools.count()))
    barrier = Barrier(8)
    writers = [EventFile(str(tmp_path)) for _ in range(8)]

    def start(number: int) -> None:
        barrier.wait()
        write(writers[number], event(number))

    with ThreadPoolExecutor(8) as threads:
        assert len([*threads.map(start, range(8))]) == 8
    for file in writers:
        file.close()
    assert sorted(steps_by_file(tmp_path)) == [[number] for number in range(8)]


def test_an_error_on_closing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NetworkFile(FileIO):
        def close(self) -> None:
            super().close()
            raise OSError("stale")

    monkeypatch.setattr(files, "FileIO", NetworkFile)
    file = EventFile(str(tmp_path))
    write(file, event(0))
    file.close()
    [reported] = caplog.messages
    assert "may lack its end: stale" in reported


class BadDisk(FileIO):
    """File of a disk that writes some bytes of a call, or fails, as the test says."""

    answers: Iterator[int | OSError]

    def write(self, data: Any) -> int:
        answer = next(self.answers, len(data))
        if isinstance(answer, OSError):
            raise answer
        return super().write(data[:answer])


ERRORS = [OSError(number, "bad disk") for number in (errno.ENOSPC, errno.EIO, errno.EFBIG)]


@settings(max_examples=200)
@given(st.lists(st.sampled_from([0, 1, 5, 12, 40, 300, 10_000, *ERRORS]), max_size=30))
def test_each_event_is_in_one_file_however_a_disk_cuts_and_fails(
    tmp_path_factory: pytest.TempPathFactory, answers: list[int | OSError]
) -> None:
    log_dir = tmp_path_factory.mktemp("run")
    file, waiting, step = EventFile(str(log_dir)), deque[bytes](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "FileIO", BadDisk)
        patch.setattr(BadDisk, "answers", iter(answers), raising=False)
        while waiting or step < 40:
            if step < 40:
                waiting.append(event(step))
                step += 1
            with suppress(OSError):
                file.append(waiting)
        file.close()
    assert list(itertools.chain(*steps_by_file(log_dir))) == list(range(40))


def test_later_files_begin_with_the_latest_repeated_event_of_each_tag(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path))
    write(file, event(0))
    for step in (1, 2):
        file.repeat("layout", event(step, "layout"))
        write(file, event(step, "layout"))
    event_files(tmp_path)[0].unlink()
    write(file, event(3))
    file.close()
    assert steps_by_file(tmp_path, "layout") == [[2]]
    assert steps_by_file(tmp_path) == [[3]]


def test_above_4_mib_the_newest_repeated_events_remain(tmp_path: Path) -> None:
    file = EventFile(str(tmp_path))
    write(file, event(0))
    large = summaries.scalar("y" * (1 << 20), 0.0)
    for step in range(10):
        repeated = summaries.event_of([summaries.scalar("count", step), large], step, 1.0)
        file.repeat(f"layout/{step}", repeated)
    event_files(tmp_path)[0].unlink()
    write(file, event(10))
    file.close()
    assert steps_by_file(tmp_path) == [[7, 8, 9, 10]]

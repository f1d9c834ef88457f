"""Event files of one writer: their names, sizes, and the errors of network drives."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from io import FileIO
from pathlib import Path

import pytest

from telemetry.events import file_writer, local_files, summaries
from telemetry.events.local_files import LocalFiles
from tests.helpers.tiny_run import event_files, steps_by_file


def record(step: int, tag: str = "count") -> bytes:
    return summaries.event_of([summaries.scalar(tag, step)], step, 1.0)


def write(files: LocalFiles, *records: bytes) -> None:
    waiting = deque(records)
    files.write(waiting)
    assert not waiting


def test_writers_whose_names_are_equal_have_separate_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in containers that share a host name, and whose process ids are all 1.
    monkeypatch.setattr(local_files, "_file_numbers", itertools.repeat(0))
    barrier = threading.Barrier(8)
    writers = [LocalFiles(str(tmp_path)) for _ in range(8)]

    def start(number: int) -> None:
        barrier.wait()
        write(writers[number], record(number))

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for files in writers:
        files.close()
    assert sorted(steps_by_file(tmp_path)) == [[number] for number in range(8)]


def test_an_error_on_closing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class NetworkFile(FileIO):
        def close(self) -> None:
            super().close()
            raise OSError("stale")

    monkeypatch.setattr(local_files, "FileIO", NetworkFile)
    files = LocalFiles(str(tmp_path))
    write(files, record(0))
    files.close()
    [reported] = caplog.messages
    assert "may lack its end: stale" in reported


@pytest.mark.parametrize("chunk", [100, 1 << 20])
def test_a_large_file_is_followed_by_another_that_begins_with_the_repeated_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(local_files, "_CHUNK_BYTES", chunk)
    files = LocalFiles(str(tmp_path), max_file_bytes=200, repeated=[record(9, "layout")])
    for step in range(9):
        write(files, record(step), record(step, "x" * 60))
    files.close()
    steps = steps_by_file(tmp_path)
    assert len(steps) == len(event_files(tmp_path)) > 1
    assert list(itertools.chain(*steps)) == list(range(9))
    assert steps_by_file(tmp_path, "layout") == [[], *[[9]] * (len(steps) - 1)]


def test_of_repeated_records_the_latest_of_each_tag_and_above_a_limit_the_smallest_remain() -> None:
    kept = file_writer._Repeated()
    limit = file_writer._MAX_REPEATED_BYTES
    kept.add("settings", b"old")
    kept.add("settings", b"small")
    for number in range(10):
        kept.add(f"layout/{number}", bytes([number]) * (limit // 3))
    assert [one[:1] for one in kept] == [b"s", b"\x08", b"\x09"]
    kept.add("huge", bytes(2 * limit))
    assert list(map(len, kept)) == [2 * limit]

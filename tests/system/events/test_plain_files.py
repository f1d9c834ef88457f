from __future__ import annotations

import os
import threading
import time
from multiprocessing import get_context
from pathlib import Path

import pytest

from telemetry.events.plain_files import PlainFiles, append_line, write_whole
from tests.helpers.disks import FreezableDisk, fill


def add_lines(path: Path, name: str, count: int) -> None:
    for number in range(count):
        append_line(path, f"{name} {number} {'x' * 500}".encode())


def threads_of_files() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "telemetry: alerts and flight files"]


# --- now -----------------------------------------------------------------------------------------


def test_a_line_is_appended_with_its_line_break(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    append_line(path, b"first")
    append_line(path, b"second")
    assert path.read_bytes() == b"first\nsecond\n"


def test_a_line_after_a_torn_line_begins_on_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"whole\nto")
    append_line(path, b"next")
    assert path.read_bytes() == b"whole\nto\nnext\n"


def test_a_line_that_does_not_fit_is_not_written_in_part(tiny_disk: Path) -> None:
    path = tiny_disk / "lines"
    append_line(path, b"first")
    ballast = fill(tiny_disk)  # the rest of the file's block remains

    with pytest.raises(OSError, match="No space left"):
        append_line(path, b"x" * 5000)
    assert path.read_bytes() == b"first\n"
    ballast.unlink()
    append_line(path, b"x" * 5000)
    assert path.read_bytes() == b"first\n" + b"x" * 5000 + b"\n"


def test_a_file_that_does_not_fit_keeps_the_previous_content(tiny_disk: Path) -> None:
    path = tiny_disk / "file"
    write_whole(path, b"old")
    fill(tiny_disk)

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"x" * 20_000)

    assert path.read_bytes() == b"old"
    assert {child.name for child in tiny_disk.iterdir()} == {"file", "ballast"}


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    context = get_context("spawn")
    writers = [context.Process(target=add_lines, args=(path, name, 300)) for name in "ab"]

    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(f"{name} {i} {'x' * 500}" for name in "ab" for i in range(300))


# --- in the background ---------------------------------------------------------------------------


def test_a_thread_begins_with_the_first_line_and_ends_with_close(tmp_path: Path) -> None:
    files = PlainFiles("runs/x")
    assert files.flush()
    assert threads_of_files() == []

    files.append_line(tmp_path / "run" / "lines", b"first")
    (thread,) = threads_of_files()
    files.write_whole(tmp_path / "run" / "file", b"content")
    assert files.flush()
    assert (tmp_path / "run" / "lines").read_bytes() == b"first\n"
    assert (tmp_path / "run" / "file").read_bytes() == b"content"
    files.close()
    thread.join(5)
    assert not thread.is_alive()


def test_refused_lines_are_retried_in_order(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = PlainFiles("runs/x")
    files.append_line(tiny_disk / "lines", b"first")
    files.flush()
    ballast = fill(tiny_disk)

    files.append_line(tiny_disk / "lines", b"x" * 5000)
    files.append_line(tiny_disk / "lines", b"third")
    files.write_whole(tiny_disk / "file", b"x" * 5000)
    files.write_whole(tiny_disk / "lines-of-others", b"")  # fits
    files.flush()
    assert (tiny_disk / "lines").read_bytes() == b"first\n"
    assert (tiny_disk / "lines-of-others").exists()
    ballast.unlink()
    files.close()

    assert (tiny_disk / "lines").read_bytes().split(b"\n") == [b"first", b"x" * 5000, b"third", b""]
    assert (tiny_disk / "file").stat().st_size == 5000
    (reported,) = caplog.messages
    assert "runs/x: alerts and flight files cannot be written for now: [Errno 28]" in reported


def test_a_removed_directory_is_made_again(tmp_path: Path) -> None:
    files = PlainFiles("runs/x")
    files.append_line(tmp_path / "a" / "run" / "lines", b"first")
    files.close()
    assert (tmp_path / "a" / "run" / "lines").exists()


def test_a_hanging_disk_does_not_block_the_caller(
    freezable_disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    files = PlainFiles("runs/x")
    lines = freezable_disk.path / "lines"
    files.append_line(lines, b"first")
    files.flush()

    with freezable_disk.frozen():
        began = time.monotonic()
        for number in range(100):
            files.append_line(lines, b"%d" % number)
        assert time.monotonic() - began < 1
        assert not files.flush(timeout_s=0.1)
        began = time.monotonic()
        files.close(timeout_s=0.1)
        assert time.monotonic() - began < 1
        (reported,) = caplog.messages

    assert "100 alerts and flight files could not be written" in reported
    assert "s ago has not ended" in reported
    for thread in threads_of_files():
        thread.join(5)
    # The disk stored them after all.
    assert lines.read_bytes().split(b"\n")[1:4] == [b"0", b"1", b"2"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    files = PlainFiles("runs/x")
    files.append_line(tmp_path / "lines", b"parent")
    files.flush()
    child = os.fork()
    if child == 0:
        files.append_line(tmp_path / "lines", b"child")
        files.flush()
        files.close()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    files.close()
    assert (tmp_path / "lines").read_bytes() == b"parent\n"

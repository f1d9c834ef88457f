"""Queue and thread of the writer, where disks are slow, full or hang."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from telemetry.events.writer import Writer

HANGS_S = 120  # a watchdog; decides no test
NEVER_S = 3600.0


class MemoryFile:
    """File in memory, which can fail or hang as a disk does."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.flush_count = 0
        self.failure: Exception | None = None
        self.is_closed = False
        self.answering = threading.Event()
        self.answering.set()
        self.entered = threading.Event()

    def append(self, items: deque[bytes]) -> None:
        self.entered.set()
        assert self.answering.wait(HANGS_S)
        if self.failure:
            raise self.failure
        while items:
            self.written.append(items.popleft())

    def flush(self) -> None:
        self.flush_count += 1

    def close(self) -> None:
        self.is_closed = True

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """The body runs while the background thread hangs in a write."""
        self.answering.clear()
        yield
        self.answering.set()


def make_writer(*, flush_s: float = NEVER_S, max_pending_bytes: int = 1 << 20) -> Writer:
    writer = Writer("runs/x", flush_s=flush_s, max_pending_bytes=max_pending_bytes)
    writer.start(MemoryFile())
    return writer


def put(writer: Writer, file: MemoryFile, *items: bytes, droppable: bool = False) -> None:
    for item in items:
        writer.put(file, item, droppable=droppable)


def start_hanging_write(writer: Writer, file: MemoryFile) -> None:
    file.entered.clear()
    writer.put(file, b"in flight", flush=True)
    assert file.entered.wait(HANGS_S)


def test_a_full_queue_drops_the_newest_measurement_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = MemoryFile()
    writer = make_writer(max_pending_bytes=1000)
    with file.hanging():
        start_hanging_write(writer, file)
        put(writer, file, *[b"measurement %d" % i for i in range(50)], droppable=True)
        put(writer, file, b"loss", b"alert")
    writer.close()
    kept = len(file.written) - 3
    assert 0 < kept < 50
    measurements = [b"measurement %d" % i for i in range(kept)]
    assert file.written == [b"in flight", *measurements, b"loss", b"alert"]
    assert (writer.dropped_count, writer.lost_count) == (50 - kept, 0)
    reported, total = caplog.messages
    assert "measurements are dropped" in reported
    assert f"{50 - kept} measurements were dropped" in total


def test_records_that_must_not_be_dropped_are_lost_above_the_limit_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = MemoryFile()
    file.failure = OSError("no disk")
    writer = make_writer(max_pending_bytes=1000)
    put(writer, file, bytes(36))
    writer.flush()
    put(writer, file, *[bytes(36)] * 99)
    writer.close()
    assert writer.lost_count == 100  # after failed writes or above the limit
    assert len(caplog.messages) == 2
    assert "100 events could not be written (no disk)" in caplog.messages[-1]


def test_a_file_that_cannot_be_created_is_tried_again() -> None:
    file, writer = MemoryFile(), Writer("runs/x", flush_s=NEVER_S)
    file.failure = OSError("no room")
    put(writer, file, b"before")
    with pytest.raises(OSError, match="no room"):
        writer.start(file)
    file.failure = None
    put(writer, file, b"after")
    writer.close()
    assert file.written == [b"before", b"after"]


def test_files_keep_the_order_of_their_items_and_a_failing_one_does_not_stop_the_others() -> None:
    writer, files = make_writer(), [MemoryFile(), MemoryFile()]
    files[0].failure = OSError("no disk")
    for number in range(5):
        for file in files:
            put(writer, file, b"%d" % number)
    writer.flush()
    put(writer, files[0], b"5")
    assert [file.written for file in files] == [[], [b"0", b"1", b"2", b"3", b"4"]]
    files[0].failure = None
    writer.close()
    assert files[0].written == [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert all(file.flush_count and file.is_closed for file in files)


def test_items_are_held_until_the_writer_starts_or_they_are_discarded() -> None:
    for starts in (True, False):
        file, writer = MemoryFile(), Writer("runs/x", flush_s=NEVER_S)
        put(writer, file, b"a", b"b")
        writer.flush()
        assert file.written == []
        if starts:
            writer.start(file)
            put(writer, file, b"c")
        else:
            writer.discard()
        writer.close()
        assert (file.written, writer.lost_count) == ([b"a", b"b", b"c"] * starts, 0)


def test_an_unforeseen_error_does_not_end_the_thread() -> None:
    file = MemoryFile()
    writer = make_writer()
    file.failure = ZeroDivisionError("a failure of ours")
    put(writer, file, b"a")
    writer.flush()
    file.failure = None
    put(writer, file, b"b")
    writer.close()
    assert file.written == [b"a", b"b"]


def test_close_times_out_on_a_hanging_disk_and_counts_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = MemoryFile()
    writer = make_writer()
    with file.hanging():
        start_hanging_write(writer, file)
        put(writer, file, b"a", b"b")
        assert not writer.flush(timeout_s=0.25)
        writer.close(timeout_s=0)  # no time is left
        writer.close()  # returns at once
        assert writer.lost_count == 3
        (reported,) = caplog.messages
    found = re.search(
        r"3 events could not .* \(a write that began (.*) s ago has not ended\)", reported
    )
    assert found is not None
    assert float(found[1]) >= 0.2
    writer._thread.join(HANGS_S)
    assert file.written == [b"in flight", b"a", b"b"]
    assert writer.lost_count == 0  # all were written in the end


def test_an_interrupted_close_can_be_finished() -> None:
    file = MemoryFile()
    writer = make_writer()
    with file.hanging():
        start_hanging_write(writer, file)
        put(writer, file, b"a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer._changed, "wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.close()
    writer.close()  # as the interpreter does when it exits
    assert file.written == [b"in flight", b"a"]
    assert file.is_closed


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_many_threads_may_add_at_once() -> None:
    file = MemoryFile()
    writer = make_writer(flush_s=0.001)
    items = [[b"%d %d" % (n, i) for i in range(500)] for n in range(8)]
    with ThreadPoolExecutor(8) as threads:
        for own in items:
            threads.submit(put, writer, file, *own)
    writer.close()
    assert len(file.written) == 8 * 500
    for n, own in enumerate(items):
        assert [record for record in file.written if record.startswith(b"%d " % n)] == own
    assert writer._pending_bytes == 0


def test_a_signal_handler_may_write_and_close_while_its_thread_adds() -> None:
    file = MemoryFile()
    writer = make_writer()
    with writer._lock:  # where the handler interrupts put()
        put(writer, file, b"from the handler")
        writer.flush()
        writer.close()
    assert file.written == [b"from the handler"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_the_queue_is_locked_does_not_hang() -> None:
    file = MemoryFile()
    writer = make_writer()
    locked, forked = threading.Event(), threading.Event()

    def lock() -> None:
        with writer._lock:
            locked.set()
            assert forked.wait(HANGS_S)

    thread = threading.Thread(target=lock)
    thread.start()
    assert locked.wait(HANGS_S)
    child = os.fork()
    if child == 0:
        signal.alarm(HANGS_S)
        put(writer, file, b"child")
        writer.flush()
        writer.close()
        os._exit(7)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    put(writer, file, b"parent")
    writer.close()
    assert file.written == [b"parent"]

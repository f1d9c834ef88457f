"""A queue and its thread, which writes to disks that are slow, full or hang."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from telemetry.events.background import BackgroundWriter

HANGS_S = 120  # a watchdog; decides no test
NEVER_S = 3600.0


class MemoryFiles:
    """Files in memory, which can fail or hang as a disk does."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.urgent: list[bool] = []
        self.failure: Exception | None = None
        self.fail_after: int | None = None
        self.is_closed = False
        self.answering = threading.Event()
        self.answering.set()
        self.entered = threading.Event()

    def write(self, records: deque[bytes], *, urgent: bool) -> None:
        self.entered.set()
        assert self.answering.wait(HANGS_S)
        self.urgent.append(urgent)
        while records:
            if self.failure:
                raise self.failure
            self.written.append(records.popleft())

    def close(self) -> None:
        self.is_closed = True

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """The body runs while the background thread hangs in a write."""
        self.answering.clear()
        yield
        self.answering.set()


def make_writer(
    files: MemoryFiles, *, flush_s: float = NEVER_S, max_pending_bytes: int = 1 << 20
) -> BackgroundWriter[bytes]:
    writer = BackgroundWriter(
        files, name="runs/x", flush_s=flush_s, max_pending_bytes=max_pending_bytes
    )
    writer.flush()
    return writer


def put(writer: BackgroundWriter[bytes], *records: bytes, droppable: bool = False) -> None:
    for record in records:
        writer.put(record, droppable=droppable, flush=False)


def start_hanging_write(writer: BackgroundWriter[bytes], files: MemoryFiles) -> None:
    files.entered.clear()
    writer.put(b"in flight", droppable=False, flush=True)
    assert files.entered.wait(HANGS_S)


def test_a_full_queue_drops_the_newest_measurement_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = MemoryFiles()
    writer = make_writer(files, max_pending_bytes=1000)

    with files.hanging():
        start_hanging_write(writer, files)
        put(writer, *[b"measurement %d" % i for i in range(50)], droppable=True)
        put(writer, b"loss", b"alert")
    writer.close()

    kept = len(files.written) - 3
    assert 0 < kept < 50
    assert files.written == [
        b"in flight",
        *[b"measurement %d" % i for i in range(kept)],
        b"loss",
        b"alert",
    ]
    assert (writer.dropped_count, writer.lost_count) == (50 - kept, 0)
    reported, total = caplog.messages
    assert "measurements are dropped" in reported
    assert f"{50 - kept} measurements were dropped" in total


def test_records_that_must_not_be_dropped_are_lost_above_the_limit_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = MemoryFiles()
    files.failure = OSError("no disk")
    writer = make_writer(files, max_pending_bytes=1000)

    put(writer, bytes(36))
    writer.flush()

    put(writer, *[bytes(36)] * 99)
    writer.close()

    assert writer.lost_count == 100  # after failed writes or above the limit
    assert len(caplog.messages) == 2
    assert "100 events could not be written (no disk)" in caplog.messages[-1]


def test_an_unforeseen_error_does_not_end_the_thread() -> None:
    files = MemoryFiles()
    writer = make_writer(files)
    files.failure = ZeroDivisionError("a failure of ours")
    put(writer, b"a")
    writer.flush()
    files.failure = None

    put(writer, b"b")
    writer.close()

    assert files.written == [b"a", b"b"]


def test_close_times_out_on_a_hanging_disk_and_counts_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    with files.hanging():
        start_hanging_write(writer, files)
        put(writer, b"a", b"b")
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
    assert files.written == [b"in flight", b"a", b"b"]
    assert writer.lost_count == 0  # all were written in the end


def test_an_interrupted_close_can_be_finished() -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    with files.hanging():
        start_hanging_write(writer, files)
        put(writer, b"a")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer._changed, "wait_for", interrupt)
            with pytest.raises(KeyboardInterrupt):
                writer.close()
    writer.close()  # as the interpreter does when it exits

    assert files.written == [b"in flight", b"a"]
    assert files.is_closed


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_many_threads_may_add_at_once() -> None:
    files = MemoryFiles()
    writer = make_writer(files, flush_s=0.001)
    threads = [
        threading.Thread(target=put, args=(writer, *[b"%d %d" % (n, i) for i in range(500)]))
        for n in range(8)
    ]

    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()

    assert sorted(files.written) == sorted(b"%d %d" % (n, i) for n in range(8) for i in range(500))
    for n in range(8):
        own = [record for record in files.written if record.startswith(b"%d " % n)]
        assert own == [b"%d %d" % (n, i) for i in range(500)]
    assert writer._pending_bytes == 0


def test_a_signal_handler_may_write_and_close_while_its_thread_adds() -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    with writer._lock:  # where the handler interrupts put()
        put(writer, b"from the handler")
        writer.flush()
        writer.close()

    assert files.written == [b"from the handler"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_forked_while_the_queue_is_locked_does_not_hang() -> None:
    files = MemoryFiles()
    writer = make_writer(files)
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
        put(writer, b"child")
        writer.flush()
        writer.close()
        os._exit(7)
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    put(writer, b"parent")
    writer.close()
    assert files.written == [b"parent"]

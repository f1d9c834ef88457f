from __future__ import annotations

import logging
import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from telemetry.events import background
from telemetry.events.background import BackgroundWriter

WAIT_S = 5
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
        assert self.answering.wait(WAIT_S)
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
    assert files.entered.wait(WAIT_S)


def test_records_are_written_in_the_order_of_adding() -> None:
    files = MemoryFiles()
    writer = make_writer(files)
    records = [b"%d" % i for i in range(100)]

    put(writer, *records)
    writer.flush()

    assert files.written == records
    writer.close()


def test_close_writes_queued_records_and_closes_the_files() -> None:
    files = MemoryFiles()
    writer = make_writer(files)
    put(writer, b"a", b"b")

    writer.close()
    writer.close()

    assert files.written == [b"a", b"b"]
    assert files.is_closed


def test_records_are_written_within_the_interval() -> None:
    files = MemoryFiles()
    writer = make_writer(files, flush_s=0.01)
    files.entered.clear()

    put(writer, b"a")

    with writer._changed:
        assert writer._changed.wait_for(lambda: files.written == [b"a"], WAIT_S)
    writer.close()


def test_a_record_may_request_a_flush_without_blocking() -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    with files.hanging():
        put(writer, b"a")
        writer.put(b"alert", droppable=False, flush=True)
        assert files.written == []

    with writer._changed:
        assert writer._changed.wait_for(lambda: len(files.written) == 2, WAIT_S)
    assert files.urgent[-1]
    writer.close()


def test_many_bytes_are_written_before_the_interval_ends() -> None:
    files = MemoryFiles()
    writer = make_writer(files, max_pending_bytes=1 << 30)

    put(writer, bytes(background._WAKE_BYTES))

    with writer._changed:
        assert writer._changed.wait_for(lambda: len(files.written) == 1, WAIT_S)
    writer.close()


def test_adding_never_blocks_on_the_disk() -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    with files.hanging():
        start_hanging_write(writer, files)
        put(writer, *[b"%d" % i for i in range(1000)])
        assert files.written == []

    writer.close()
    assert len(files.written) == 1001


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


def test_records_are_accepted_again_once_the_queue_is_written() -> None:
    files = MemoryFiles()
    writer = make_writer(files, max_pending_bytes=1000)

    for _ in range(20):
        put(writer, bytes(800), droppable=True)
        writer.flush()

    assert len(files.written) == 20
    assert writer.dropped_count == 0
    writer.close()


def test_an_empty_queue_accepts_a_record_of_any_size() -> None:
    files = MemoryFiles()
    writer = make_writer(files, max_pending_bytes=1000)
    for _ in range(3):
        put(writer, bytes(5000), droppable=True)
        writer.flush()
    writer.close()
    assert list(map(len, files.written)) == [5000] * 3
    assert writer.dropped_count == 0


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


def test_failed_writes_are_retried_in_order(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    files = MemoryFiles()
    writer = make_writer(files)
    files.failure = OSError("no space left")

    put(writer, b"a", b"b")
    writer.flush()
    put(writer, b"c")
    writer.flush()
    assert (files.written, writer.failure) == ([], files.failure)
    files.failure = None
    writer.flush()

    assert files.written == [b"a", b"b", b"c"]
    assert writer.failure is None
    writer.close()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "no space left" in caplog.messages[0]


def test_records_added_during_a_failing_write_are_written_after_it() -> None:
    files = MemoryFiles()
    writer = make_writer(files)
    files.failure = OSError("no space left")

    with files.hanging():
        start_hanging_write(writer, files)
        put(writer, b"a")
    writer.flush()
    files.failure = None
    writer.close()

    assert files.written == [b"in flight", b"a"]


def test_a_failing_disk_is_not_tried_at_every_record() -> None:
    files = MemoryFiles()
    writer = make_writer(files, max_pending_bytes=1 << 30)
    files.failure = OSError("no space left")
    put(writer, bytes(2 * background._WAKE_BYTES))
    writer.flush()
    attempts = len(files.urgent)

    put(writer, *[b"a"] * 100)

    assert not writer._is_due()
    assert len(files.urgent) == attempts
    writer.close()


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
    writer._thread.join(WAIT_S)
    assert files.written == [b"in flight", b"a", b"b"]
    assert writer.lost_count == 0  # all were written in the end


def test_flush_returns_true_if_the_disk_responds_even_with_an_error() -> None:
    files = MemoryFiles()
    writer = make_writer(files)

    put(writer, b"a")
    assert writer.flush(timeout_s=WAIT_S)
    files.failure = OSError("no space left")
    put(writer, b"b")
    assert writer.flush(timeout_s=WAIT_S)  # it responded with an error
    files.failure = None
    writer.close()


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


def test_a_closed_writer_refuses_records() -> None:
    writer = make_writer(MemoryFiles())
    writer.close()

    with pytest.raises(OSError, match="runs/x: the writer is closed"):
        put(writer, b"a")


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

"""The background thread: takes steps from the training thread without ever making it wait."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from telemetry.capture import CapturedStep
from telemetry.faults import Faults
from telemetry.processing import LoggedScalars, Processor, ReadyValues

log = logging.getLogger("telemetry")

MAX_DETAIL_BYTES = 64 * 2**20
MAX_BYTES = 2 * MAX_DETAIL_BYTES
"""While more bytes wait than the former, full measurements are reduced to their norms; while more
than the latter, steps are dropped."""

CLOSE_TIMEOUT_S = 60.0

FEW = 8
FEW_S = 0.5
"""Steps with norms only are processed this many at a time, or as many as arrive within this time:
between two training steps our code has left the core's cache, and one step alone takes twice as
long."""

Item = CapturedStep | LoggedScalars | ReadyValues | Callable[[], None]
Result = TypeVar("Result")


class _Thread(threading.Thread):
    """Of a pipeline; none of them waits for another, for that one may be waiting for it."""


class Pipeline:
    """Queues steps from the training thread, and processes them on a thread of its own.

    While 64 MiB wait, a full measurement is reduced to its norms, so that rules still see each
    step. Only while another 64 MiB wait, steps are dropped. Both are counted and logged. What the
    user logged is never dropped. A forked child ignores everything.

    Steps with norms only, and what the user logged, are processed a few at a time, after half a
    second or eight steps at most; at once while a rule asks for full measurements.

    Args:
        processor: Judges and writes each step, on the background thread.
        faults: Where failures are reported.
    """

    def __init__(self, processor: Processor, faults: Faults) -> None:
        self._processor = processor
        self._faults = faults
        # Not a Queue: its lock is not reentrant, and close() may run from the garbage collector
        # while the same thread is inside of submit().
        self._queue: SimpleQueue[Item | threading.Event | None] = SimpleQueue()
        # Holds something when the queue should be processed without waiting for more.
        self._hurry: SimpleQueue[None] = SimpleQueue()
        # How many items of the queue may be processed without another wait.
        self._few = 0
        # Each count has one thread that writes it; a common one would need a lock.
        self._steps_taken = self._steps_done = 0
        self._bytes_taken = self._bytes_done = 0
        self._pid = os.getpid()
        self._closed = False
        self._abandoned = False
        self._late: threading.Event | None = None
        self.thinned = 0
        self.dropped = 0
        self._thread = _Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def submit(self, captured: CapturedStep) -> None:
        """Queue a finished step, or as much of it as there is room for."""
        if self._closed or os.getpid() != self._pid:
            return
        bytes_waiting = self._bytes_taken - self._bytes_done
        if bytes_waiting > MAX_BYTES:
            self.dropped += 1
            self._report_short(captured.step, "is not recorded", self.dropped)
            return
        if bytes_waiting > MAX_DETAIL_BYTES and captured.window.full:
            captured = captured.without_detail()
            self.thinned += 1
            self._report_short(captured.step, "is recorded with its norms alone", self.thinned)
        self._steps_taken += 1
        self._bytes_taken += captured.nbytes
        self._queue.put(captured)
        if captured.window.full or self.full_wanted or (captured.step + 1) % FEW == 0:
            self._hurry.put(None)

    def submit_logged(self, item: LoggedScalars | ReadyValues) -> None:
        """Queue what the user logged."""
        if not self._closed and os.getpid() == self._pid:
            self._queue.put(item)

    @property
    def is_late(self) -> bool:
        """Whether a :meth:`flush` has given up, and what it waited for is still not done."""
        return self._late is not None and not self._late.is_set()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything so far is judged and handed on to the writer.

        Returns at once on the background thread of this or another pipeline.
        """
        here = threading.current_thread()
        if self._closed or os.getpid() != self._pid or isinstance(here, _Thread):
            return
        done = threading.Event()
        self._queue.put(done)
        self._hurry.put(None)
        if not done.wait(timeout_s):
            self._late = done
            log.warning("telemetry: the steps so far are not judged within %.3g s", timeout_s)

    @property
    def full_wanted(self) -> bool:
        """Whether a rule asks for a full measurement of the next step."""
        return self._processor.full_wanted

    @full_wanted.setter
    def full_wanted(self, wanted: bool) -> None:
        self._processor.full_wanted = wanted

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules remember once they have judged everything so far, as plain values.

        Args:
            step: In progress; what was logged for it is part of the state.
        """
        return self._in_turn(lambda: self._processor.state_dict(step)) or {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Let the rules continue from there, with ``step`` in progress; what did not fit."""
        misfits = self._in_turn(lambda: self._processor.load_state_dict(state, step))
        return ["the rules"] if misfits is None else misfits

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Judge what is waiting, end the thread, and report what was lost; harmless when repeated.

        Not to be called on the background thread.
        """
        if os.getpid() != self._pid:
            return
        was_closed, self._closed = self._closed, True
        self._queue.put(None)
        self._hurry.put(None)
        self._thread.join(timeout_s)
        self._abandoned = True
        if not was_closed:
            self._report_losses(timeout_s)

    def _in_turn(self, act: Callable[[], Result]) -> Result | None:
        """What ``act`` returns once everything so far is judged; None if that takes too long."""
        if self._closed or os.getpid() != self._pid or self.on_own_thread():
            return act()
        results: SimpleQueue[Result] = SimpleQueue()
        self._queue.put(lambda: results.put(act()))
        self._hurry.put(None)
        try:
            return results.get(timeout=CLOSE_TIMEOUT_S)
        except Empty:
            log.warning("telemetry: the rules take longer than %.0f s", CLOSE_TIMEOUT_S)
            return None

    def on_own_thread(self) -> bool:
        """Whether the caller is the background thread: a rule or a callback."""
        return threading.current_thread() is self._thread

    def _report_short(self, step: int, what: str, count: int) -> None:
        if count == 1:
            log.warning(
                "telemetry: step %d %s, earlier ones are still being judged; "
                "use a larger every_n_steps to keep up (logged once, counted until close)",
                step,
                what,
            )

    def _report_losses(self, timeout_s: float) -> None:
        losses = {
            "were recorded with their norms alone": self.thinned,
            "were dropped": self.dropped,
            f"were not judged within {timeout_s:.3g} s": self._steps_taken - self._steps_done,
        }
        parts = [f"{count} steps {what}" for what, count in losses.items() if count]
        if parts:
            log.warning("telemetry: %s", "; ".join(parts))

    # --- on the background thread --------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None and not self._abandoned:
            with self._faults.contained("to record a step"):
                self._take(item)
        if not self._abandoned:
            self._processor.write_pending()

    def _next(self) -> Item | threading.Event | None:
        """The oldest item; those that are queued behind it come next without another wait."""
        while True:
            try:
                item = self._queue.get(timeout=self._processor.pending_s())
                break
            except Empty:
                self._processor.write_pending()
        if self._few == 0:
            with contextlib.suppress(Empty):
                pending_s = self._processor.pending_s()
                self._hurry.get(timeout=FEW_S if pending_s is None else min(FEW_S, pending_s))
                while True:
                    self._hurry.get_nowait()
            self._few = 1 + self._queue.qsize()
        self._few -= 1
        return item

    def _take(self, item: Item | threading.Event) -> None:
        if isinstance(item, threading.Event):
            self._processor.write_pending()
            item.set()
        elif callable(item):
            item()
        else:
            try:
                self._processor.process(item)
            finally:
                if isinstance(item, CapturedStep):
                    self._steps_done += 1
                    self._bytes_done += item.nbytes

"""Takes steps from the training thread, which never waits, to a thread that processes them."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from telemetry.capture import CapturedStep, LightStep
from telemetry.failures import Failures
from telemetry.pipeline.processing import Item, LoggedScalars, Processor, ReadyValues

log = logging.getLogger("telemetry")

# While more bytes wait than the former, full measurements are reduced to their norms; while more
# than the latter, steps are dropped.
MAX_DETAIL_BYTES = 64 * 2**20
MAX_BYTES = 2 * MAX_DETAIL_BYTES

# Once there is a step, the thread waits so long for others, or until there are so many: between
# two steps of training our code leaves the core's cache, and one alone takes twice as long.
STEPS_AT_ONCE = 12
GATHER_S = 0.2

CLOSE_TIMEOUT_S = 60.0

Result = TypeVar("Result")
Act: TypeAlias = Callable[[], None]


class _StepThread(threading.Thread):
    """The thread of a pipeline."""


class Pipeline:
    """Queues what the training thread hands over, and processes it in that order on its own thread.

    While 64 MiB wait, a full measurement is reduced to its norms, so that rules still see each
    step. Only while another 64 MiB wait, steps are dropped. Both are counted and logged. What the
    user logged is never dropped. A forked child ignores everything.

    Steps with finite norms alone, and what the user logged, wait for eleven others, a fifth of a
    second at most.

    Args:
        processor: Judges and writes each step.
        failures: Where failures are reported.
    """

    def __init__(self, processor: Processor, failures: Failures) -> None:
        self._processor = processor
        self._failures = failures
        # None ends the thread. Unlike with a Queue, put() may run while the same thread is inside
        # of put(): the garbage collector may close a logger anywhere.
        self._items: SimpleQueue[Item | LoggedScalars | Act | None] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()  # holds something when nothing is to wait
        # Each count has one thread that writes it; a common one would need a lock.
        self._steps_taken = self._bytes_taken = 0
        self._steps_done = self._bytes_done = 0
        self.thinned = 0
        self.dropped = 0
        self._pid = os.getpid()
        self._closed = False
        self._abandoned = False  # nobody waits for the rest any more, and nothing may be written
        self._late: threading.Event | None = None
        self._thread = _StepThread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def submit(self, step: CapturedStep | LightStep) -> None:
        """Queue a finished step, or as much of it as there is room for."""
        if self._closed or os.getpid() != self._pid:
            return
        waiting = self._bytes_taken - self._bytes_done
        if waiting > MAX_BYTES:
            self.dropped += 1
            self._report_short(step.step, "is not recorded", self.dropped)
            return
        if waiting > MAX_DETAIL_BYTES and isinstance(step, CapturedStep) and step.full:
            step = step.without_detail()
            self.thinned += 1
            self._report_short(step.step, "is recorded with its norms alone", self.thinned)
        self._steps_taken += 1
        self._bytes_taken += step.nbytes
        self._items.put(step)
        several = self._steps_taken - self._steps_done >= STEPS_AT_ONCE
        if several or (isinstance(step, CapturedStep) and step.is_urgent):
            self._bell.put(None)

    def submit_logged(self, item: LoggedScalars | ReadyValues, *, at_once: bool = False) -> None:
        """Queue what the user logged; ``at_once``: have it processed without waiting for more."""
        if not self._closed and os.getpid() == self._pid:
            self._items.put(item)
            if at_once:
                self._bell.put(None)

    def ignore_all(self) -> None:
        """Take nothing from now on: another process does it."""
        self._closed = True

    @property
    def is_late(self) -> bool:
        """Whether a :meth:`flush` has given up, and what it waited for is still not done."""
        return self._late is not None and not self._late.is_set()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything so far is judged and handed on to the writer.

        Returns at once on the background thread of this or another pipeline.
        """
        here = threading.current_thread()
        if self._closed or os.getpid() != self._pid or isinstance(here, _StepThread):
            return
        done = threading.Event()

        def finish() -> None:
            try:
                self._processor.write_pending()
            finally:
                done.set()

        self.put_now(finish)
        if not done.wait(timeout_s):
            self._late = done
            log.warning("telemetry: the steps so far are not judged within %.3g s", timeout_s)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules remember once they have judged everything so far, as plain values.

        Args:
            step: In progress; what was logged for it is part of the state.
        """
        return self.in_turn(lambda: self._processor.state_dict(step)) or {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Let the rules continue from there, with ``step`` in progress; what did not fit."""
        misfits = self.in_turn(lambda: self._processor.load_state_dict(state, step))
        return ["the rules"] if misfits is None else misfits

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Judge what is waiting, end the thread, and report what was lost; harmless when repeated.

        Not to be called on the background thread.
        """
        if os.getpid() != self._pid:
            return
        was_closed, self._closed = self._closed, True
        self.put_now(None)
        self._thread.join(timeout_s)
        self._abandoned = True
        if not was_closed:
            self._report_losses(timeout_s)

    def in_turn(self, act: Callable[[], Result]) -> Result | None:
        """What ``act`` returns once everything so far is judged; None if that takes too long."""
        if self._closed or os.getpid() != self._pid or self.on_own_thread():
            return act()
        results: SimpleQueue[Result] = SimpleQueue()
        self.put_now(lambda: results.put(act()))
        try:
            return results.get(timeout=CLOSE_TIMEOUT_S)
        except Empty:
            log.warning("telemetry: the rules take longer than %.0f s", CLOSE_TIMEOUT_S)
            return None

    def on_own_thread(self) -> bool:
        """Whether the caller is the background thread: a rule or a callback."""
        return threading.current_thread() is self._thread

    def put_now(self, item: Item | Act | None) -> None:
        """Queue something, and have all before it done at once; None: it was the last."""
        self._items.put(item)
        self._bell.put(None)

    # --- on the background thread ---------------------------------------------------------------

    def _run(self) -> None:
        """Process all, until the end of the run is put there."""
        while not self._abandoned:
            try:
                first = self._items.get(timeout=self._processor.pending_s())
            except Empty:
                self._processor.write_pending()
                continue
            with suppress(Empty):
                self._bell.get(timeout=GATHER_S)
            logged: list[LoggedScalars] = []  # processed together, which costs a fraction
            for item in chain([first], self._queued()):
                if isinstance(item, LoggedScalars):
                    logged.append(item)
                    continue
                self._processor.log(logged)
                logged = []
                if item is None:
                    self._processor.end()
                if item is None or self._abandoned:
                    return
                with self._failures.contained("to record a step"):
                    self._process(item)
            self._processor.log(logged)
            with suppress(Empty):  # what rang for these has nothing to say of later ones
                while True:
                    self._bell.get_nowait()

    def _queued(self) -> Iterator[Item | LoggedScalars | Act | None]:
        """The queued items; ends when there is none."""
        with suppress(Empty):
            while True:
                yield self._items.get_nowait()

    def _process(self, item: Item | Act) -> None:
        if isinstance(item, CapturedStep | LightStep):
            try:
                self._processor.process(item)
            finally:
                self._steps_done += 1
                self._bytes_done += item.nbytes
        elif callable(item):
            item()
        else:
            self._processor.process(item)

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

"""Queue between the training thread, which never blocks, and the worker that processes steps."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from telemetry.capture import Step
from telemetry.failures import Failures
from telemetry.pipeline.processing import Item, LoggedScalars, Processor
from telemetry.threads import start

log = logging.getLogger("telemetry")

# High-water marks of backpressure in queued bytes. Above the first, full steps are downgraded to
# their norms; above the second, steps are dropped.
MAX_DETAIL_BYTES = 64 * 2**20
MAX_BYTES = 2 * MAX_DETAIL_BYTES

# The worker wakes up this long after the first queued step, or once so many steps are queued.
# Between two steps of training our code leaves the core's cache: a single step takes twice as long.
STEPS_AT_ONCE = 12
GATHER_S = 0.2

CLOSE_TIMEOUT_S = 60.0

Result = TypeVar("Result")
Callback: TypeAlias = Callable[[], None]


class _Worker(threading.Thread):
    """Background thread of a pipeline."""


class Pipeline:
    """Queue of steps and logged scalars, which one worker processes in order.

    Above the first high-water mark of 64 MiB, a full step is downgraded to its norms, so that rules
    still judge each step. Above the second one of 128 MiB, steps are dropped. Both are counted and
    logged. Logged scalars are never dropped. A forked child ignores everything.

    Steps with finite norms alone and logged scalars are processed in batches: of twelve steps, or
    after a fifth of a second.

    Attributes:
        downgraded, dropped: Numbers of steps.

    Raises:
        NoThreadError: The system refuses the worker.
    """

    def __init__(self, processor: Processor, failures: Failures) -> None:
        self._processor = processor
        self._failures = failures
        # None ends the worker. Unlike Queue.put(), that of SimpleQueue is reentrant: the garbage
        # collector may close a logger inside of it.
        self._items: SimpleQueue[Item | LoggedScalars | Callback | None] = SimpleQueue()
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        # Each counter has one thread that writes it; a shared one would need a lock.
        self._steps_taken = self._bytes_taken = 0
        self._steps_done = self._bytes_done = 0
        self.downgraded = 0
        self.dropped = 0
        self._pid = os.getpid()
        self._closed = False
        self._abandoned = False  # close() has timed out: nothing more may be written
        self._has_ended = threading.Event()
        self._thread = _Worker(target=self._run, name="telemetry", daemon=True)
        start(self._thread)

    def submit(self, step: Step) -> None:
        """Queue a finished step; under backpressure, downgrade or drop it."""
        if self._closed or os.getpid() != self._pid:
            return
        queued_bytes = self._bytes_taken - self._bytes_done
        if queued_bytes > MAX_BYTES:
            self.dropped += 1
            self._report_backpressure(step.step, "is not recorded", self.dropped)
            return
        if queued_bytes > MAX_DETAIL_BYTES and step.full:
            step = step.without_tensors()
            self.downgraded += 1
            self._report_backpressure(
                step.step, "is recorded with its norms alone", self.downgraded
            )
        self._steps_taken += 1
        self._bytes_taken += step.nbytes
        self._items.put(step)
        if step.is_urgent or self._steps_taken - self._steps_done >= STEPS_AT_ONCE:
            self._wakeup.put(None)

    def put(self, item: Item | LoggedScalars | Callback, *, now: bool = True) -> None:
        """Queue anything else; ``now``: wake the worker up."""
        if not self._closed and os.getpid() == self._pid:
            self._items.put(item)
            if now:
                self._wakeup.put(None)

    def ignore_all(self) -> None:
        """Ignore all later steps and values: another process records them."""
        self._closed = True

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Block until all queued items are judged and passed to the writer.

        Returns at once on the worker of any pipeline.
        """
        if not isinstance(threading.current_thread(), _Worker):
            self.run_on_worker(lambda: None, timeout_s)

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Process the queued items, end the worker, and log lost steps. Idempotent.

        A second call continues an interrupted one. Must not be called on the worker.
        """
        if os.getpid() != self._pid:
            return
        self._closed = True
        self._items.put(None)
        self._wakeup.put(None)
        # Not Thread.join(): after a Ctrl-C in it, Python 3.11 takes the thread for ended.
        self._has_ended.wait(timeout_s)
        was_closed, self._abandoned = self._abandoned, True
        if not was_closed:
            self._report_losses(timeout_s)

    def run_on_worker(
        self, fn: Callable[[], Result], timeout_s: float = CLOSE_TIMEOUT_S
    ) -> Result | None:
        """Return the result of ``fn``, called after all queued items.

        None if it raises, which is logged, or after a timeout.
        """
        if self._closed or os.getpid() != self._pid or self.on_own_thread():
            return fn()
        results: SimpleQueue[Result | None] = SimpleQueue()

        def call() -> None:
            result = None
            try:
                result = fn()
            finally:
                results.put(result)

        self.put(call)
        try:
            return results.get(timeout=timeout_s)
        except Empty:
            log.warning("telemetry: queued steps are not judged within %.3g s", timeout_s)
            return None

    def on_own_thread(self) -> bool:
        """Whether the caller runs on the worker, such as a rule or a callback."""
        return threading.current_thread() is self._thread

    # --- on the worker ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._process_all()
        finally:
            self._has_ended.set()

    def _process_all(self) -> None:
        while not self._abandoned:
            first = self._items.get()
            with suppress(Empty):
                self._wakeup.get(timeout=GATHER_S)
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
                with self._failures.contained("to record a step", of=BaseException):
                    self._process(item)
            self._processor.log(logged)
            with suppress(Empty):  # earlier wake-ups do not concern later items
                while True:
                    self._wakeup.get_nowait()

    def _queued(self) -> Iterator[Item | LoggedScalars | Callback | None]:
        with suppress(Empty):
            while True:
                yield self._items.get_nowait()

    def _process(self, item: Item | Callback) -> None:
        if isinstance(item, Step):
            nbytes = item.nbytes
            try:
                self._processor.process(item)
            finally:
                self._steps_done += 1
                self._bytes_done += nbytes
        elif callable(item):
            item()
        else:
            self._processor.process(item)

    def _report_backpressure(self, step: int, what: str, count: int) -> None:
        if count == 1:
            log.warning(
                "telemetry: step %d %s, because earlier steps are still queued; "
                "use a larger every_n_steps (logged once, counted until close)",
                step,
                what,
            )

    def _report_losses(self, timeout_s: float) -> None:
        within = "" if self._has_ended.is_set() else f" within {timeout_s:.3g} s"
        losses = {
            "were recorded with their norms alone": self.downgraded,
            "were dropped": self.dropped,
            f"were not judged{within}": self._steps_taken - self._steps_done,
        }
        parts = [f"{count} steps {what}" for what, count in losses.items() if count]
        if parts:
            log.warning("telemetry: %s", "; ".join(parts))

"""The background thread: everything that is put there is processed, in that order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from telemetry.capture import CapturedStep, LightStep
from telemetry.failures import Failures
from telemetry.logged import LoggedScalars, ReadyValues
from telemetry.processing import Processor
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.part import Merged

FEW_S = 0.5
"""The longest time for which a step waits for others, to be processed right before them."""

Act: TypeAlias = Callable[[], None]
Item: TypeAlias = (
    CapturedStep | LightStep | LoggedScalars | ReadyValues | Merged | Act | threading.Event
)


class StepThread(threading.Thread):
    """Processes what the training thread puts here.

    It begins to do so when it is woken, or half a second after something has come: between two
    steps of training our code has left the core's cache, and one step alone takes twice as long.

    Args:
        processor: Judges and writes each step.
        failures: Where failures are reported.

    Attributes:
        processor: As above; another one may take its place before the first step.
        asleep: Whether it waits without end, so that whoever brings something has to wake it.
        steps_done: How many steps were processed.
        bytes_done: What those had taken.
        merged_bytes_done: Of what the ranks measured together, how much was processed.
    """

    def __init__(self, processor: Processor, failures: Failures) -> None:
        super().__init__(name="telemetry", daemon=True)
        self.processor: Processor | RankProcessor = processor
        self._failures = failures
        # None ends the run. Neither this nor the next is a Queue: its lock is not reentrant, and
        # close() may run from the garbage collector while the same thread is inside of put().
        self._items: deque[Item | None] = deque()
        # Holds something when the items should be processed without waiting for more.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.asleep = False
        self.steps_done = self.bytes_done = self.merged_bytes_done = 0

    def put(self, item: Item | None) -> None:
        """Have something processed; None ends the thread."""
        self._items.append(item)
        if self.asleep:
            self.wake()

    def wake(self) -> None:
        """Process what has come, without waiting for more."""
        self._wake.put(None)

    # --- on the thread itself ------------------------------------------------------------------

    def run(self) -> None:
        """Process all, until the end of the run is put here."""
        on = True
        while on and not self.processor.abandoned:
            self._wait_for_several()
            on = self._process_waiting()
        if not self.processor.abandoned:
            self.processor.write_pending()

    def _wait_for_several(self) -> None:
        """Wait until steps are handed over, or for some time from when something has come."""
        until = time.monotonic() + FEW_S
        while (left_s := until - time.monotonic()) > 0:
            if self._is_woken(left_s):
                return
        if self.processor.pending_s() is None and not self._items:
            self.asleep = True
            if not self._items:  # of what came before, nobody tells us
                self._wake.get()
            self.asleep = False
            self._wait_for_several()

    def _is_woken(self, timeout_s: float) -> bool:
        """Wait for that, or until the processor has something to do."""
        pending_s = self.processor.pending_s()
        try:
            self._wake.get(timeout=timeout_s if pending_s is None else min(timeout_s, pending_s))
        except Empty:
            if pending_s is not None and pending_s <= timeout_s:
                self.processor.write_pending()
            return False
        with contextlib.suppress(Empty):
            while True:
                self._wake.get_nowait()
        return True

    def _process_waiting(self) -> bool:
        """Process what is there, in the order in which it came; False if the run ends with it."""
        while self._items and not self.processor.abandoned:
            item = self._items.popleft()
            if item is None:
                return False
            with self._failures.contained("to record a step"):
                self._process(item)
        return True

    def _process(self, item: Item) -> None:
        if isinstance(item, CapturedStep | LightStep):
            try:
                self.processor.process(item)
            finally:
                self.steps_done += 1
                self.bytes_done += item.nbytes
        elif isinstance(item, LoggedScalars | ReadyValues):
            self.processor.process(item)
        elif isinstance(item, Merged):
            assert isinstance(self.processor, RankProcessor)
            try:
                self.processor.record(item)
            finally:
                self.merged_bytes_done += len(item.payload)
        elif isinstance(item, threading.Event):
            self.processor.write_pending()
            item.set()
        else:
            item()

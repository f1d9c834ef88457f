"""The background thread: everything that is put there is processed, in that order."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TypeAlias

from telemetry.capture import CapturedStep, LightBlock, LightRows
from telemetry.failures import Failures
from telemetry.logged import LoggedScalars, ReadyValues
from telemetry.processing import Processor
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.part import Merged

FEW_S = 0.5
"""The longest time for which a step waits for others, to be processed with them."""

Act: TypeAlias = Callable[[], None]
Item: TypeAlias = (
    CapturedStep | LightBlock | LoggedScalars | ReadyValues | Merged | Act | threading.Event
)


class StepThread(threading.Thread):
    """Processes what the training thread puts here.

    Steps with norms only, and what the user logged, are processed a few at a time: after half a
    second, or when it is woken.

    Args:
        processor: Judges and writes each step.
        failures: Where failures are reported.

    Attributes:
        processor: As above; another one may take its place before the first step.
        block: The latest that was put here. Its rows are processed as they are added.
        asleep: Whether it waits without end, so that whoever brings something has to wake it.
        steps_done: How many steps were processed.
        bytes_done: What those had taken.
        merged_bytes_done: Of what the ranks measured together, how much was processed.
    """

    def __init__(self, processor: Processor, failures: Failures) -> None:
        super().__init__(name="telemetry", daemon=True)
        self.processor: Processor | RankProcessor = processor
        self._failures = failures
        # Each with the number of rows that were in the latest block before it; None ends the run.
        # Neither this nor the next is a Queue: its lock is not reentrant, and close() may run from
        # the garbage collector while the same thread is inside of put().
        self._items: deque[tuple[int, Item | None]] = deque()
        # Holds something when the items should be processed without waiting for more.
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.asleep = False
        self.block: LightBlock | None = None
        self.steps_done = self.bytes_done = self.merged_bytes_done = 0
        # The block whose rows come next, and how many were taken.
        self._current: LightBlock | None = None
        self._rows_done = 0
        self._few: list[LightRows | CapturedStep | LoggedScalars] = []
        self._merged: list[Merged] = []

    def put(self, item: Item | None) -> None:
        """Have something processed; None ends the thread."""
        self._items.append((self.block.count if self.block is not None else 0, item))
        if isinstance(item, LightBlock):
            self.block = item
        self.rouse()

    def rouse(self) -> None:
        """Something has come, perhaps a row: begin to wait for others to process it with."""
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
            on = self._take_waiting(everything=not self._handed_over())
        if not self.processor.abandoned:
            self.processor.end()

    def _handed_over(self) -> bool:
        """Wait until steps are handed over; False if none were for some time."""
        until = time.monotonic() + FEW_S
        while (left_s := until - time.monotonic()) > 0:
            if self._is_woken(left_s):
                return True
        if self.processor.pending_s() is None and not self._anything_waits():
            self.asleep = True
            if not self._anything_waits():  # of what came before, nobody tells us
                self._wake.get()
            self.asleep = False
            return self._handed_over()
        return False

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

    def _anything_waits(self) -> bool:
        block = self._current
        return bool(self._items) or (block is not None and block.count > self._rows_done)

    def _take_waiting(self, *, everything: bool) -> bool:
        """Process what is there, in the order in which it came; False if the run ends with it.

        Args:
            everything: Also the rows of a block that is not closed.
        """
        while not self.processor.abandoned:
            # Counted first: what was logged before these rows is among the items then.
            block, count = self._current, 0
            if block is not None:
                count = block.count if everything else block.handed_over
            items = [self._items.popleft() for _ in range(len(self._items))]
            for rows, item in items:
                self._gather_rows(rows)
                if item is None:
                    self._process_few()
                    return False
                self._take(item)
            if self._current is block:
                self._gather_rows(count)
            if not items:
                break
        self._process_few()
        return True

    def _take(self, item: Item) -> None:
        if isinstance(item, LightBlock):
            if self._current is not None:
                self.bytes_done += self._current.nbytes
            self._current, self._rows_done = item, 0
        elif isinstance(item, LoggedScalars) or (isinstance(item, CapturedStep) and item.is_light):
            self._few.append(item)
        elif isinstance(item, Merged):
            self._merged.append(item)
        else:
            self._process_few()
            with self._failures.contained("to record a step"):
                self._process(item)

    def _gather_rows(self, end: int) -> None:
        block, first = self._current, self._rows_done
        if block is not None and end > first:
            self._few.append(LightRows(block=block, first=first, end=end))
            self._rows_done = end

    def _process_few(self) -> None:
        """Process what was gathered."""
        if self._merged:
            self._process_merged()
        few, self._few = self._few, []
        if few:
            try:
                self.processor.process_few(few)
            finally:
                steps = [item for item in few if not isinstance(item, LoggedScalars)]
                self.steps_done += sum(map(len, steps))
                self.bytes_done += sum(s.nbytes for s in steps if isinstance(s, CapturedStep))

    def _process_merged(self) -> None:
        merged, self._merged = self._merged, []
        assert isinstance(self.processor, RankProcessor)
        try:
            self.processor.record(merged)
        finally:
            self.merged_bytes_done += sum(len(item.payload) for item in merged)

    def _process(self, item: CapturedStep | ReadyValues | threading.Event | Act) -> None:
        if isinstance(item, threading.Event):
            self.processor.write_pending()
            item.set()
        elif isinstance(item, CapturedStep):
            try:
                self.processor.process(item)
            finally:
                self.steps_done += 1
                self.bytes_done += item.nbytes
        elif isinstance(item, ReadyValues):
            self.processor.process(item)
        else:
            item()

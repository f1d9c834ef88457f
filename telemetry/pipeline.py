"""Takes steps from the training thread without ever making it wait, as far as there is room."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from telemetry.capture import CapturedStep, LightStep
from telemetry.failures import Failures
from telemetry.logged import LoggedScalars, ReadyValues
from telemetry.processing import Processor
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.part import Merged
from telemetry.schedule import STEPS_AT_ONCE, FullSteps
from telemetry.step_thread import StepThread

log = logging.getLogger("telemetry")

MAX_DETAIL_BYTES = 64 * 2**20
MAX_BYTES = 2 * MAX_DETAIL_BYTES
"""While more bytes wait than the former, full measurements are reduced to their norms; while more
than the latter, steps are dropped."""

CLOSE_TIMEOUT_S = 60.0

Result = TypeVar("Result")


class Pipeline:
    """Queues steps from the training thread, and processes them on a thread of its own.

    While 64 MiB wait, a full measurement is reduced to its norms, so that rules still see each
    step. Only while another 64 MiB wait, steps are dropped. Both are counted and logged. What the
    user logged is never dropped. A forked child ignores everything.

    Steps with norms only, and what the user logged, are looked at a few at a time: after half a
    second or eight steps at most; at once where the answer of the rules is needed soon.

    Args:
        processor: Judges and writes each step, on the background thread.
        full_steps: Which steps are measured in full; is told what the rules were given when.
        failures: Where failures are reported.
    """

    def __init__(self, processor: Processor, full_steps: FullSteps, failures: Failures) -> None:
        self._full_steps = full_steps
        # The first step that the rules are not shown yet, and whether all from there on have norms
        # in the host's memory, so that the answer does not depend on an accelerator.
        self._first: int | None = None
        self._answer_is_near = True
        # Each count has one thread that writes it; a common one would need a lock.
        self._steps_taken = self._bytes_taken = 0
        self._merged_bytes_taken = 0
        self._pid = os.getpid()
        self._closed = False
        self._late: threading.Event | None = None
        self.thinned = 0
        self.dropped = 0
        self.dropped_merged = 0
        self._thread = StepThread(processor, failures)
        self._thread.start()

    def submit(self, step: CapturedStep | LightStep) -> None:
        """Queue a finished step, or as much of it as there is room for."""
        if self._closed or os.getpid() != self._pid or not self._has_room(step.step):
            return
        window = step.window if isinstance(step, CapturedStep) else None
        if isinstance(step, CapturedStep) and step.window.full:
            step = self._with_room(step)
        self._steps_taken += 1
        self._bytes_taken += step.nbytes
        self._thread.put(step)
        if window is not None and window.phase:
            self._thread.wake()
            return
        if self._first is None:
            self._begin_few(step.step)
        self._answer_is_near &= window is None or window.on_host
        if (window is not None and window.full) or self._is_last(step.step):
            self._hand_over(step.step)

    def _with_room(self, step: CapturedStep) -> CapturedStep:
        """A full measurement, or its norms alone."""
        if self._bytes_taken - self._thread.bytes_done <= MAX_DETAIL_BYTES:
            return step
        self.thinned += 1
        self._report_short(step.step, "is recorded with its norms alone", self.thinned)
        return step.without_detail()

    def _begin_few(self, step: int) -> None:
        self._first, self._answer_is_near = step, True

    def _is_last(self, step: int) -> bool:
        """Whether the rules are shown this step and those before it now."""
        return (step + 1) % STEPS_AT_ONCE == 0 or self._full_steps.is_soon(step)

    def _hand_over(self, step: int) -> None:
        if self._answer_is_near and self._first is not None:
            self._full_steps.expect(self._first, step)
        self._first = None
        self._thread.wake()

    def _has_room(self, step: int) -> bool:
        if self._bytes_taken - self._thread.bytes_done <= MAX_BYTES:
            return True
        self.dropped += 1
        self._report_short(step, "is not recorded", self.dropped)
        return False

    def use(self, processor: RankProcessor) -> None:
        """Have this one process all steps; before the first."""
        self._thread.processor = processor

    def ignore_all(self) -> None:
        """Take nothing from now on: another process does it."""
        self._closed = True

    def submit_merged(self, merged: Merged) -> bool:
        """Queue what the ranks measured together; returns whether there is room for it."""
        if self._merged_bytes_taken - self._thread.merged_bytes_done > MAX_BYTES:
            self.dropped_merged += 1
            self._report_short(merged.step, "is not recorded", self.dropped_merged)
            return False
        self._merged_bytes_taken += len(merged.payload)
        self.submit_logged(merged)
        return not self._closed

    def submit_logged(self, item: LoggedScalars | ReadyValues | Merged) -> None:
        """Queue what the user logged, or what the ranks measured together."""
        if not self._closed and os.getpid() == self._pid:
            self._thread.put(item)

    @property
    def is_late(self) -> bool:
        """Whether a :meth:`flush` has given up, and what it waited for is still not done."""
        return self._late is not None and not self._late.is_set()

    def flush(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait until everything so far is judged and handed on to the writer.

        Returns at once on the background thread of this or another pipeline.
        """
        here = threading.current_thread()
        if self._closed or os.getpid() != self._pid or isinstance(here, StepThread):
            return
        done = threading.Event()
        self._thread.put(done)
        self._thread.wake()
        if not done.wait(timeout_s):
            self._late = done
            log.warning("telemetry: the steps so far are not judged within %.3g s", timeout_s)

    def state_dict(self, step: int) -> dict[str, Any]:
        """What the rules remember once they have judged everything so far, as plain values.

        Args:
            step: In progress; what was logged for it is part of the state.
        """
        return self.in_turn(lambda: self._thread.processor.state_dict(step)) or {}

    def load_state_dict(self, state: Mapping[str, Any], step: int) -> list[str]:
        """Let the rules continue from there, with ``step`` in progress; what did not fit."""
        misfits = self.in_turn(lambda: self._thread.processor.load_state_dict(state, step))
        return ["the rules"] if misfits is None else misfits

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Judge what is waiting, end the thread, and report what was lost; harmless when repeated.

        Not to be called on the background thread.
        """
        if os.getpid() != self._pid:
            return
        was_closed, self._closed = self._closed, True
        self._thread.put(None)
        self._thread.wake()
        self._thread.join(timeout_s)
        self._thread.processor.abandoned = True
        if not was_closed:
            self._report_losses(timeout_s)

    def in_turn(self, act: Callable[[], Result]) -> Result | None:
        """What ``act`` returns once everything so far is judged; None if that takes too long."""
        if self._closed or os.getpid() != self._pid or self.on_own_thread():
            return act()
        results: SimpleQueue[Result] = SimpleQueue()
        self._thread.put(lambda: results.put(act()))
        self._thread.wake()
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
        waiting = self._steps_taken - self._thread.steps_done
        losses = {
            "were recorded with their norms alone": self.thinned,
            "were dropped": self.dropped + self.dropped_merged,
            f"were not judged within {timeout_s:.3g} s": waiting,
        }
        parts = [f"{count} steps {what}" for what, count in losses.items() if count]
        if parts:
            log.warning("telemetry: %s", "; ".join(parts))

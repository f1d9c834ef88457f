"""Where several ranks write one run: a step is sent, comes back merged, and is recorded once."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping

from telemetry.alert import Alert, alert_fields, parse_alert
from telemetry.capture import CapturedStep, LightStep
from telemetry.capture.measured import MeasuredMaker
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.pipeline.schedule import FullSteps
from telemetry.ranks.channel import CLOSE_S, Channel
from telemetry.ranks.measured import Measured
from telemetry.ranks.messages import News
from telemetry.ranks.observer import RankObserver
from telemetry.ranks.whole import WholeRecords
from telemetry.records import StepRecord
from telemetry.shared.plain_text import ranks_in_words

# While more wait to be judged, steps are dropped.
MAX_BYTES = 128 * 2**20

# Full measurements of the first rank that are kept until they come back merged.
_OWN_KEPT = 8

# A step that rules ask for is announced so much before, for all ranks to hear of it.
_LEAD_STEPS = 16
_LEAD_S = 2.0

_numbers = itertools.count()


class RankExchange:
    """Sends what this rank measured to the first rank; there, makes records of what comes back.

    Those of several loggers are told apart by the order in which each process makes its loggers.

    Args:
        put: Queues what comes back, on the first rank.

    Attributes:
        observer: Tells the capture what this rank is to measure.
        is_first: Whether this rank records what comes back.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        put: Callable[[Measured], None],
        full_steps: FullSteps,
        current_step: Callable[[], int],
        failures: Failures,
    ) -> None:
        self.observer = RankObserver(rank=rank, size=size)
        self.is_first = rank == 0
        self._maker = MeasuredMaker(self.observer.standing)
        self._put = put
        self._full_steps = full_steps
        self._current_step = current_step
        self._first_step = current_step()
        self._announced: set[int] = set()  # of these, late ranks have nothing in full
        self._last: tuple[int, float] = (-1, 0.0)  # step and time of the latest record
        self._step_s = 0.0
        self._failures = failures
        self._whole = WholeRecords()
        self._own: dict[tuple[int, str], StepRecord] = {}
        self._changed = threading.Condition()
        self._bytes = 0  # of those that came back and are yet to be recorded
        self._awaited: tuple[int, bool] | None = None  # the latest sent, until it is recorded
        self._alert: Alert | None = None
        self._channel = Channel(
            name=str(next(_numbers)),
            rank=rank,
            world_size=size,
            deliver=self.take,
            heard=self._hear,
            failures=failures,
            first_step=self._first_step,
        )

    # --- on the background thread ----------------------------------------------------------------

    def send(self, record: StepRecord, step: CapturedStep | LightStep) -> None:
        """What this rank measured, and the record of it."""
        if self.is_first and (record.full or record.phase):
            self._own[record.step, record.phase] = record
            while len(self._own) > _OWN_KEPT:
                del self._own[next(iter(self._own))]
        captured = step if isinstance(step, CapturedStep) else None
        self._send(self._maker.part(record, captured))

    def send_logged(self, step: int, values: Mapping[str, float]) -> None:
        """What was logged for a step that did not end."""
        self._send(self._maker.logged(step, values))

    def _send(self, part: Measured) -> None:
        self._awaited = part.step, not part.phase  # phases of a step come before it
        self._channel.send(part)

    def record(self, merged: Measured) -> StepRecord | None:
        """Of what came back; None if the step did not end, or nothing says what its layers are."""
        own = self._own.pop((merged.step, merged.phase), None)
        record = self._whole.record(merged, own) if merged.stages else None
        if record is not None:
            self._see(merged, record)
        return record

    def take(self, merged: Measured) -> None:
        """On the thread of the channel; what there is no room for is not recorded."""
        with self._changed:
            fits = self._bytes <= MAX_BYTES
            self._bytes += merged.nbytes
        if fits:
            self._put(merged)
            return
        self._failures.log_once(
            f"step {merged.step} is not recorded, earlier ones are still being judged; use a "
            "larger every_n_steps to keep up",
            kind="merged steps",
        )
        self.note_recorded(merged)

    def note_recorded(self, merged: Measured) -> None:
        """It is judged and written, or left out."""
        with self._changed:
            self._bytes -= merged.nbytes
            if self._awaited is not None and (merged.step, not merged.phase) >= self._awaited:
                self._awaited = None
                self._changed.notify_all()

    # --- news for all ranks ----------------------------------------------------------------------

    def announce(self, step: int) -> None:
        """Rules that have judged a step want a full one; the next is the same on all ranks.

        Nothing is done if one that comes later has been announced, or while nobody knows how long a
        step takes.
        """
        if step <= max(self._announced, default=-1) or self._step_s <= 0:
            return
        now, step_s, (last, wall_time) = self._current_step(), self._step_s, self._last
        if now > last + 1:  # the first steps are slow
            step_s = min(step_s, max(1e-6, time.time() - wall_time) / (now - last - 1))
        at = now + max(_LEAD_STEPS, math.ceil(_LEAD_S / step_s))
        self._announced.add(at)
        self._channel.announce(at)

    def _see(self, part: Measured, record: StepRecord) -> None:
        """Note how long steps take; report ranks that measure other steps in full than the rest."""
        if not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = part.ranks - part.measured
        if part.measured and others and part.step not in self._announced:
            self._failures.log_once(
                f"step {part.step} was measured in full by {ranks_in_words(part.measured)} and not "
                f"by {ranks_in_words(others)}; use the same every_n_steps on all ranks, without "
                "max_overhead",
                kind="intervals",
            )

    def _hear(self, news: News) -> None:
        """Do as the first rank announces; report if it counts otherwise than this one."""
        if news.first_step not in (None, self._first_step):
            self._failures.log_once(
                f"this rank counts its steps from {self._first_step} and the first rank from "
                f"{news.first_step}, so their records do not meet; give all ranks the same "
                'first_step (with "auto", each has to see the directory of the run)',
                kind="first step",
            )
        if news.full_step > self._current_step():  # else this rank is too late
            self._full_steps.ask(news.full_step)
        if news.message and self._alert is None:
            self._alert = parse_alert(json.loads(news.message))

    # --- on the training thread ------------------------------------------------------------------

    def raise_together(self, alert: Alert) -> None:
        """Have all ranks raise this alert at the end of the same step; on the first rank."""
        self._channel.raise_together(json.dumps(alert_fields(alert)))

    def to_raise(self, step: int | None) -> Alert | None:
        """The alert to raise now that this step has ended; None as a step: no other will."""
        return self._alert if self._channel.agreement.step_ended(step) else None

    def wait(self, timeout_s: float) -> None:
        """Wait until all that was sent has come back merged; only on the first rank."""
        if self.is_first and self._channel.is_in_own_process:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        """End the exchange; on the first rank, after all that others sent in time is recorded."""
        each_within(min(CLOSE_S, timeout_s), self.wait, self._channel.close)

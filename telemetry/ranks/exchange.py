"""Exchange of steps between the ranks that write one run: sent, merged on rank 0, recorded once."""

from __future__ import annotations

import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Mapping

from telemetry.alert import Alert, alert_fields, parse_alert
from telemetry.capture import CapturedStep, LightStep
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.plain_text import ranks_in_words
from telemetry.ranks.channel import CLOSE_S, Announcement, Channel
from telemetry.ranks.merged_records import MergedRecords
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.part_maker import PartMaker
from telemetry.ranks.partial_record import PartialRecord
from telemetry.ranks.topology import RankObserver
from telemetry.records import StepRecord

# High-water mark of merged steps that are queued for the rules: above it, steps are dropped.
MAX_BYTES = 128 * 2**20

# Full records of rank 0 that are kept until they return merged.
_OWN_KEPT = 8

# Rank 0 announces a requested full step so long before, so that all ranks receive it in time.
_LEAD_STEPS = 16
_LEAD_S = 2.0

_numbers = itertools.count()


class Exchange:
    """Exchange of a process that trains alone: each step is recorded here and at once.

    Attributes:
        observer: Selects the tensors that this rank measures; None: all tensors.
        records: Whether this process records steps, so that its rules judge them.
    """

    observer: RankObserver | None = None
    records = True
    _alert: Alert | None = None  # to raise

    def send(self, record: StepRecord, step: CapturedStep | LightStep) -> StepRecord | None:
        """Return the record to judge and write now; None: it returns merged, see :meth:`merged`."""
        return record

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        """Return logged scalars to judge and write now; others return merged with their step."""
        return values

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        """Send the scalars that were logged for steps that did not end."""

    def merged(self, merged: MergedStep) -> StepRecord | None:
        """Return the record of a merged step; None: the step did not end, or has no layout."""
        raise NotImplementedError

    def note_recorded(self, merged: MergedStep) -> None:
        """Note that a merged step is written or dropped."""

    def request_full(self, step: int) -> bool:
        """Have all ranks measure a step after this one in full; False: this process decides."""
        return False

    def raise_on_all(self, alert: Alert) -> None:
        """Have all ranks raise this alert at the end of the same step; the first alert counts."""
        self._alert = self._alert or alert

    def to_raise(self, step: int | None) -> Alert | None:
        """Return the alert to raise at the end of this step; None as a step: training has ended."""
        alert, self._alert = self._alert, None
        return alert

    def wait(self, timeout_s: float) -> None:
        """Wait until all sent steps are recorded; on other ranks than 0, return at once."""

    def close(self, timeout_s: float) -> None:
        """End the exchange; rank 0 first records what the others send in time."""


class RankExchange(Exchange):
    """Sends the steps of this rank to rank 0, and makes records of merged steps there.

    Several loggers are paired by the order in which each process makes them.

    Args:
        put: Queues a merged step, on rank 0.
        ask: Has this rank measure a step in full.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        put: Callable[[MergedStep], None],
        ask: Callable[[int], None],
        current_step: Callable[[], int],
        failures: Failures,
    ) -> None:
        self.observer = RankObserver(rank=rank, size=size)
        self.records = rank == 0
        self._maker = PartMaker(self.observer.topology)
        self._put = put
        self._ask = ask
        self._current_step = current_step
        self._first_step = current_step()
        self._announced: set[int] = set()  # full steps, of which a late rank has only the norms
        self._last: tuple[int, float] = (-1, 0.0)  # step and time of the latest record
        self._step_s = 0.0
        self._failures = failures
        self._merged_records = MergedRecords()
        self._own: dict[tuple[int, str], StepRecord] = {}
        self._changed = threading.Condition()
        self._queued_bytes = 0  # of merged steps
        self._awaited: tuple[int, bool] | None = None  # the latest sent, until it is recorded
        self._channel = Channel(
            name=str(next(_numbers)),
            rank=rank,
            world_size=size,
            deliver=self.take,
            on_announcement=self._on_announcement,
            failures=failures,
            first_step=self._first_step,
        )

    # --- on the background thread ----------------------------------------------------------------

    def send(self, record: StepRecord, step: CapturedStep | LightStep) -> StepRecord | None:
        if self.records and (record.full or record.phase):
            self._own[record.step, record.phase] = record
            while len(self._own) > _OWN_KEPT:
                del self._own[next(iter(self._own))]
        self._send(self._maker.part(record, step if isinstance(step, CapturedStep) else None))
        return None

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        return {}

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        for step, values in sorted(logged.items()):
            self._send(self._maker.logged(step, values))

    def _send(self, part: PartialRecord) -> None:
        self._awaited = part.step, not part.phase  # phases of a step come before it
        self._channel.send(part)

    def merged(self, merged: MergedStep) -> StepRecord | None:
        own = self._own.pop((merged.step, merged.phase), None)
        record = self._merged_records.record(merged, own)
        if record is not None and not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = merged.ranks - merged.measured
        if merged.measured and others and merged.step not in self._announced:
            self._failures.log_once(
                f"step {merged.step} was measured in full by {ranks_in_words(merged.measured)} and "
                f"not by {ranks_in_words(others)}; use the same every_n_steps on all ranks, "
                "without max_overhead",
                kind="intervals",
            )
        return record

    def take(self, merged: MergedStep) -> None:
        """Queue a merged step, on the thread of the channel; drop it above the high-water mark."""
        with self._changed:
            fits = self._queued_bytes <= MAX_BYTES
            self._queued_bytes += merged.nbytes
        if fits:
            self._put(merged)
            return
        self._failures.log_once(
            f"step {merged.step} is not recorded, earlier ones are still being judged; use a "
            "larger every_n_steps to keep up",
            kind="merged steps",
        )
        self.note_recorded(merged)

    def note_recorded(self, merged: MergedStep) -> None:
        with self._changed:
            self._queued_bytes -= merged.nbytes
            if self._awaited is not None and (merged.step, not merged.phase) >= self._awaited:
                self._awaited = None
                self._changed.notify_all()

    # --- announcements ---------------------------------------------------------------------------

    def request_full(self, step: int) -> bool:
        """Announce a full step; not if a later one is announced, or a step's time is unknown."""
        if step > max(self._announced, default=-1) and self._step_s > 0:
            now, step_s, (last, wall_time) = self._current_step(), self._step_s, self._last
            if now > last + 1:  # the first steps are slow
                step_s = min(step_s, max(1e-6, time.time() - wall_time) / (now - last - 1))
            at = now + max(_LEAD_STEPS, math.ceil(_LEAD_S / step_s))
            self._announced.add(at)
            self._channel.announce(at)
        return True

    def _on_announcement(self, announcement: Announcement) -> None:
        """Follow rank 0's announcement; log a first step that differs from this rank's."""
        if announcement.first_step not in (None, self._first_step):
            self._failures.log_once(
                f"this rank counts its steps from {self._first_step} and rank 0 from "
                f"{announcement.first_step}, so their records do not meet; give all ranks the same "
                'first_step (with "auto", each needs to read the directory of the run)',
                kind="first step",
            )
        if announcement.full_step > self._current_step():  # else this rank is too late
            self._ask(announcement.full_step)
        if announcement.message and self._alert is None:
            self._alert = parse_alert(json.loads(announcement.message))

    # --- on the training thread ------------------------------------------------------------------

    def raise_on_all(self, alert: Alert) -> None:
        self._channel.raise_on_all(json.dumps(alert_fields(alert)))

    def to_raise(self, step: int | None) -> Alert | None:
        return self._alert if self._channel.barrier.step_ended(step) else None

    def wait(self, timeout_s: float) -> None:
        if self.records and self._channel.is_in_own_process:
            with self._changed:
                self._changed.wait_for(lambda: self._awaited is None, timeout_s)

    def close(self, timeout_s: float) -> None:
        each_within(min(CLOSE_S, timeout_s), self.wait, self._channel.close)

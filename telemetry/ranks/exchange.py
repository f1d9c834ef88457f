"""Exchange of steps between ranks: records are sent, merged on rank 0 and recorded once.

It calls no collective. Only background threads wait, each time for a bounded time and with bounded
memory; the :class:`Barrier`, before an alert is raised, is the exception.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from torch import distributed

from telemetry.alert import Alert
from telemetry.events.message_pack import encode
from telemetry.failures import Failures
from telemetry.plain_text import ranks_in_words
from telemetry.ranks.collector import LAST_SEQUENCE, Barrier, Collector
from telemetry.ranks.connection import (
    BARRIER,
    ENDED,
    RECORDS,
    Client,
    Rendezvous,
    Server,
    in_thread,
    wait_for,
)
from telemetry.ranks.merging import MergedRecords, MergedStep
from telemetry.ranks.rank_record import RankRecord, RankRecords, decode
from telemetry.ranks.topology import RankNotes, RankObserver
from telemetry.records import StepRecord
from telemetry.records.batches import Batch
from telemetry.records.step import NO_LAYOUT
from telemetry.threads import each_within
from telemetry.version import __version__

# High-water mark of merged steps that are queued for the rules: above it, steps are dropped.
MAX_BYTES = 128 * 2**20

# Rank 0 announces a requested full step so long before, so that all ranks receive it in time.
_LEAD_STEPS = 16
_LEAD_S = 2.0

# Heartbeat timeout: a rank that sends no message for this time is unresponsive.
TIMEOUT_S = 10.0

CLOSE_S = 20.0
_SEARCH_S = 5.0
_LAST_S = 2.0

# Intervals of checks for a process group, and for timeouts: a longer one was idle, or a stop of
# this process, and no rank was late.
_GROUP_S, _CHECK_S, _LONGEST_S = 0.5, 0.2, 1.0

# Time for ranks to answer at which step they stop.
ANSWER_S = 10.0

_numbers = itertools.count()


def _event_loop() -> asyncio.AbstractEventLoop:
    selector = selectors.DefaultSelector()
    for descriptor in socket.socketpair():  # a loop that fails to make its own prints a traceback
        descriptor.close()
    return asyncio.SelectorEventLoop(selector)


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """State that rank 0 broadcasts; each version replaces the one before."""

    full_step: int = 0  # latest full step that is not in the schedule, or 0
    alert: Alert | None = None  # that all ranks raise: it closes their barriers ...
    raise_at: int | None = None  # ... and this decides
    raises: bool = True  # False: training is to stop by itself


class Exchange:
    """Exchange of a process that trains alone: each step is recorded here and at once."""

    observer: RankObserver | None = None  # selects the tensors to measure; None: all
    records = True  # whether this process records steps, so that its rules judge them
    raises = True  # whether an alert raises; else training is to stop by itself
    _alert: Alert | None = None  # to raise

    def send(self, record: StepRecord, notes: RankNotes) -> StepRecord | None:
        """Return the record to judge and write now; None: it returns merged, see :meth:`merged`."""
        return record

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        """Return logged scalars to judge and write now; others return merged with their step."""
        return values

    def noted(self, batch: Batch) -> Batch:
        """Return the batch with its rank; other ranks than 0 send it with the next step."""
        return batch

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        """Send the scalars that were logged for steps that did not end."""

    def merged(self, merged: MergedStep) -> StepRecord:
        """Return the record of a merged step, see :meth:`MergedRecords.record`."""
        raise NotImplementedError

    def note_recorded(self, merged: MergedStep) -> None:
        """Note that a merged step is written or dropped."""

    def request_full(self, step: int) -> bool:
        """Have all ranks measure a step after this one in full; False: this process decides."""
        return False

    def raise_on_all(self, alert: Alert, *, raises: bool = True) -> None:
        """Have all ranks raise the first such alert, or stop, at the end of the same step."""
        if self._alert is None:
            self._alert, self.raises = alert, raises

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

    A separate thread connects the ranks as soon as there is a default process group; until then,
    records are queued. A forked child does nothing.

    Args:
        put: Queues a merged step, on rank 0.
        ask: Has this rank measure a step in full.
        name: As for :class:`Rendezvous`; default: the number of this logger in its process.

    Raises:
        OSError: No file descriptor is left.
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
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._loop = _event_loop()
        self.observer = RankObserver(rank=rank, size=size)
        self.records = rank == 0
        self._rank, self._size = rank, size
        self._put = put
        self._ask = ask
        self._current_step = current_step
        self._failures = failures
        # The worker uses these:
        self._maker = RankRecords(self.observer)
        self._batches: list[Batch] = []  # not sent yet
        self._merged_records = MergedRecords()
        self._announced = -1  # latest full step, of which a late rank has only the norms
        self._last: tuple[int, float] = (-1, 0.0)  # step and time of the latest record
        self._step_s = 0.0
        # All threads:
        self._changed = threading.Condition()
        self._queued_bytes = 0  # of merged steps
        self._sent = self._recorded = -1  # sequence numbers of the latest steps
        self.barrier = Barrier(current_step())
        # The thread of the exchange:
        self._clock, self._read_at = 0.0, time.monotonic()
        self._announcement = Announcement()
        self._asked_at = math.inf  # to raise
        self._answers: dict[int, int] = {}  # numbers of the ranks' current steps
        self._close_at = self._rest_at = math.inf  # ends of merging, and of receiving more steps
        self._rendezvous = Rendezvous(f"{__version__}/{next(_numbers) if name is None else name}")
        self._server: Server | None = None
        follow = partial(self._do, self._follow)
        self._client = Client(self._rendezvous, rank, follow) if rank else None
        self._collector = Collector(world_size=size, timeout_s=timeout_s)
        self._wakeup = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    def _submit(self, callback: Callable[..., None], *arguments: object) -> None:
        """Have the thread of the exchange call this."""
        if self._thread.is_alive():  # not in a forked child
            with suppress(RuntimeError):  # it has ended meanwhile
                self._loop.call_soon_threadsafe(self._do, callback, *arguments)

    # --- on the worker ---------------------------------------------------------------------------

    def send(self, record: StepRecord, notes: RankNotes) -> StepRecord | None:
        part = self._maker.of(record, notes)
        self.send_part(replace(part, batches=tuple(self._batches)))
        self._batches = []
        return None

    def logged(self, values: dict[str, float]) -> dict[str, float]:
        return {}

    def noted(self, batch: Batch) -> Batch:
        batch = replace(batch, rank=self._rank)
        self._batches += [] if self.records else [batch]
        return batch

    def send_rest(self, logged: Mapping[int, Mapping[str, float]]) -> None:
        for step, values in sorted(logged.items()):
            self.send_part(self._maker.logged(step, values))

    def send_part(self, part: RankRecord) -> None:
        """Send this rank's measurements; the phases of a step come before the step itself."""
        part = self._maker.numbered(part)
        self._sent = part.sequence
        if self._client is None:
            self._submit(self._add, part)
        else:
            self._submit(self._client.put, RECORDS, part.encode())

    def merged(self, merged: MergedStep) -> StepRecord:
        record = self._merged_records.record(merged)
        if record.layout is not NO_LAYOUT and not record.phase:
            step, wall_time = self._last
            self._last = record.step, record.wall_time
            self._step_s = max(0.0, record.wall_time - wall_time) / max(1, record.step - step)
        others = {o.rank for o in merged.parts.values() if o.layout_id and not o.record.full}
        if merged.measured and others and merged.step != self._announced:
            self._failures.log_once(
                f"step {merged.step} was measured in full by {ranks_in_words(merged.measured)} and "
                f"not by {ranks_in_words(others)}; use the same every_n_steps on all ranks, "
                "without max_overhead",
                kind="intervals",
            )
        return record

    def note_recorded(self, merged: MergedStep) -> None:
        with self._changed:
            self._queued_bytes -= merged.nbytes
            self._recorded = max(self._recorded, merged.sequence)
            self._changed.notify_all()

    def request_full(self, step: int) -> bool:
        """Announce a full step; not if a later one is announced, or a step's time is unknown."""
        if step > self._announced and self._step_s > 0:
            now, step_s, (last, wall_time) = self._current_step(), self._step_s, self._last
            if now > last + 1:  # the first steps are slow
                step_s = min(step_s, max(1e-6, time.time() - wall_time) / (now - last - 1))
            self._announced = at = now + max(_LEAD_STEPS, math.ceil(_LEAD_S / step_s))
            self._submit(lambda: self._broadcast(full_step=at))
        return True

    def raise_on_all(self, alert: Alert, *, raises: bool = True) -> None:
        def announce() -> None:
            if self._announcement.alert is None:
                self._broadcast(alert=alert, raises=raises)

        self._submit(announce)

    # --- on the training thread ------------------------------------------------------------------

    def to_raise(self, step: int | None) -> Alert | None:
        return self._alert if self.barrier.step_ended(step) else None

    def wait(self, timeout_s: float) -> None:
        if self.records and self._thread.is_alive():
            with self._changed:
                self._changed.wait_for(lambda: self._recorded >= self._sent, timeout_s)

    def close(self, timeout_s: float) -> None:
        each_within(min(CLOSE_S, timeout_s), self.wait, self._close)

    def _close(self, timeout_s: float) -> None:
        """Send queued records and end; this takes two more seconds at most. Idempotent."""
        self._close_at = min(self._close_at, time.monotonic() + timeout_s)
        self._submit(self._end)  # behind what was sent before
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + _LAST_S)  # returns at once in a forked child

    # --- on the thread of the exchange -----------------------------------------------------------

    def _run(self) -> None:
        with self._failures.contained("to end the exchange with other ranks"):
            self._loop.run_until_complete(self._live())
        self.barrier.decide(self._announcement.raise_at)
        self._loop.close()

    async def _live(self) -> None:
        connection = asyncio.create_task(self._connect())
        while self._rest_at == math.inf or (
            (self._collector.open and time.monotonic() < self._close_at)
            or (self._collector.members and time.monotonic() < self._rest_at)
        ):
            may_time_out = self._collector.open or self._answers or self._rest_at < math.inf
            await wait_for(self._wakeup, _CHECK_S if may_time_out else None)
            self._wakeup.clear()
            self._merge()
        self._merge(hurry=True)
        if self._client is not None:
            self._client.finish()
            left_s = self._close_at - time.monotonic()
            await asyncio.wait({connection}, timeout=min(_SEARCH_S, left_s))
            if self._client.is_known:
                await asyncio.wait({connection}, timeout=max(0, left_s - _SEARCH_S))
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _end(self) -> None:
        """End this rank; on rank 0, those with more batches have some time for their last steps."""
        self._collector.note(self._rank, self._now, LAST_SEQUENCE)
        self._rest_at = min(self._close_at, time.monotonic() + _LAST_S)

    async def _connect(self) -> None:
        with self._failures.contained("to connect to the other ranks"):
            if self._client is not None:
                await self._client.run()
                return
            while not distributed.is_initialized():
                await asyncio.sleep(_GROUP_S)
            with suppress(RuntimeError, OSError, ValueError):  # the collector logs who is missing
                listening, address = await in_thread(self._rendezvous.publish)
                self._leave_out(range(int(min(address.last_rank, self._size)) + 1, self._size))
                receive, first = partial(self._do, self._receive), encode(self._announcement)
                self._server = Server(listening, address.token, receive, first)
                await self._server.run()

    @property
    def _now(self) -> float:
        """Clock for timeouts; between two readings, at most :data:`_LONGEST_S` pass."""
        read_at, self._read_at = self._read_at, time.monotonic()
        self._clock += min(self._read_at - read_at, _LONGEST_S)
        return self._clock

    def _do(self, callback: Callable[..., None], *arguments: object) -> None:
        with self._failures.contained("to exchange records with other ranks"):
            callback(*arguments)
        self._wakeup.set()

    def _merge(self, *, hurry: bool = False) -> None:
        """On rank 0: queue the steps that are complete; in a hurry, all."""
        with self._failures.contained("to merge the records of all ranks"):
            while (step := self._collector.take(self._now, hurry=hurry)) is not None:
                if not step.phase:
                    self._collector.log_missing(step)
                self.take(step)
            self._decide()

    def _follow(self, payload: bytes) -> None:
        """Follow rank 0's announcement."""
        announcement: Announcement = decode(Announcement, payload)
        if announcement == self._announcement:
            return
        self._announcement = announcement
        if announcement.full_step > self._current_step():  # else this rank is too late
            self._ask(announcement.full_step)
        if announcement.alert is not None:
            self.raises = announcement.raises
            self._alert = self._alert or announcement.alert
            step = self.barrier.close()
            if self._client is None:
                self._answers[0], self._asked_at = step, min(self._asked_at, self._now)
            elif announcement.raise_at is None:
                self._client.put(BARRIER, str(step).encode())
        if announcement.raise_at is not None:
            self.barrier.decide(announcement.raise_at)

    # --- there, on rank 0 ------------------------------------------------------------------------

    def _leave_out(self, ranks: range) -> None:
        """Expect nothing of ranks for which no file descriptor is left."""
        for rank in ranks:
            self._collector.note(rank, self._now, LAST_SEQUENCE)
        if ranks:
            self._failures.log_once(
                f"{ranks_in_words(ranks)} cannot connect, as rank 0 may not open more files; raise "
                'ulimit -n there to twice the number of ranks, or use ranks="each"'
            )

    def _add(self, part: RankRecord) -> None:
        self._collector.add(part, self._now)

    def _receive(self, kind: bytes, payload: bytes, rank: int) -> None:
        """Take a frame of another rank; a damaged one is reported and dropped."""
        self._collector.note(rank, self._now, LAST_SEQUENCE if kind == ENDED else -1)
        if kind == RECORDS:
            self._add(decode(RankRecord, payload))
        elif kind == BARRIER:
            self._answers[rank] = int(payload)

    def take(self, merged: MergedStep) -> None:
        """Queue a merged step; drop it above the high-water mark."""
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

    def _broadcast(self, **changes: object) -> None:
        payload = encode(replace(self._announcement, **changes))  # type: ignore[arg-type]
        if self._server is not None:
            self._server.announce(payload)
        self._follow(payload)

    def _decide(self) -> None:
        """Broadcast the step at which all raise, once all ranks have answered or timed out."""
        if self._answers and self._announcement.raise_at is None:
            late = self._now - self._asked_at > ANSWER_S
            if late or self._collector.members <= self._answers.keys():
                self._broadcast(raise_at=max(self._answers.values()))

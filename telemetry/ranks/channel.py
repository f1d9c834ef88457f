"""Channel between ranks: every rank sends its measurements to rank 0, which merges them.

It calls no collective. Only background threads wait, each time for a bounded time and with bounded
memory. :class:`Barrier` is the one exception, before an alert is raised.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import distributed

from telemetry.failures import Failures
from telemetry.ranks.codec import FORMAT, decode, encode
from telemetry.ranks.connection import (
    BARRIER,
    ENDED,
    RECORDS,
    Client,
    Rendezvous,
    Server,
    in_thread,
    is_set_within,
)
from telemetry.ranks.merging import LAST_SEQUENCE, Collector, MergedStep
from telemetry.ranks.partial_record import PartialRecord

log = logging.getLogger("telemetry")

# A step's sequence number is the last of its block; the others are of phases before it. The next
# epoch begins when a run goes back to an earlier step.
PER_STEP = 2**10
EPOCH = PER_STEP * 2**34

# Heartbeat timeout: a rank that sends no message for this time is unresponsive.
TIMEOUT_S = 10.0

CLOSE_S = 20.0
TURN_S, IDLE_S = 0.02, 0.2
"""Time in which records gather to travel together, and interval of checks for timeouts."""
_SEARCH_S = 5.0
_LAST_S = 2.0

# A longer pause between two turns was a stop of this process, and no other rank was late.
_LONGEST_TURN_S = 1.0

# Time for ranks to answer at which step they stop, and for rank 0 to decide.
ANSWER_S = 10.0
BARRIER_S = 30.0


class Barrier:
    """Barrier at which all ranks raise an alert at the end of the same step; one rank's side.

    If one rank raised alone, the others would block in their next collective. So each rank's
    channel closes the barrier: its training thread does not pass the end of its current step, and
    rank 0 receives its number. The channel does not wait for the training thread, which may
    be in a collective that needs a rank which already waits. Rank 0 decides for the largest number.
    Every rank continues to the end of that step and raises there, as none has passed it.

    Rank 0 ignores ranks that do not answer in :data:`ANSWER_S`; these raise as soon as they can. If
    rank 0 does not decide in :data:`BARRIER_S`, training continues.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._ended = first_step - 1
        self._closed = self._over = False
        self._raise_at: int | None = None
        self._decided = threading.Event()

    def step_ended(self, step: int | None) -> bool:
        """Return whether to raise now, after this step; wait if the barrier is closed.

        None: training has ended.
        """
        self._ended = self._ended if step is None else step
        if not self._closed or self._over:
            return False
        if not self._decided.wait(BARRIER_S):
            log.warning(
                "telemetry: rank 0 was about to raise an alert on all ranks and became "
                "unresponsive; training continues"
            )
        elif self._raise_at is not None and step is not None and step < self._raise_at:
            return False
        self._over = True
        return self._raise_at is not None

    def close(self) -> int:
        """Stop the training thread at the end of its step; return the number of that step."""
        # First closed, then read: a training thread that was not stopped has noted its step before.
        if not self._closed:
            self._closed = True
            self._closed_at = self._ended + 1
        return self._closed_at

    def decide(self, raise_at: int | None) -> None:
        """Let the training thread continue, to raise at the end of this step; None: never."""
        self._raise_at = raise_at
        self._decided.set()


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """State that rank 0 broadcasts; each version replaces the one before."""

    first_step: int | None = None  # of rank 0; None: not connected
    full_step: int = -1  # latest full step that is not in the schedule
    message: str = ""  # alert that all ranks raise: it closes their barriers ...
    raise_at: int | None = None  # ... and this decides


class Channel:
    """Connects the loggers of one run on all ranks, on a separate thread.

    The ranks connect as soon as there is a default process group; until then, records are queued. A
    forked child does nothing.

    Args:
        name: The same for the loggers of one run on all ranks, and for no other logger.
        deliver: Called on rank 0 with each merged step, in order, on the channel's thread.
        on_announcement: Called on each rank with each announcement, on the channel's thread.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        world_size: int,
        deliver: Callable[[MergedStep], None],
        on_announcement: Callable[[Announcement], None],
        failures: Failures,
        first_step: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self._deliver = deliver
        self._on_announcement = on_announcement
        self._failures = failures
        self._now, self._turned_at = 0.0, time.monotonic()
        self._epoch, self._last = 0, -1
        self._own: list[PartialRecord] = []  # to be sent or merged
        self._announcement = Announcement() if rank else Announcement(first_step=first_step)
        self._asked_at = math.inf  # to raise
        self._answers: dict[int, int] = {}
        self._pid = os.getpid()
        self._closing = asyncio.Event()
        self._close_at = math.inf
        self.barrier = Barrier(first_step)
        self._rendezvous = Rendezvous(f"{FORMAT}/{name}")
        self._server: Server | None = None
        self._client = Client(self._rendezvous, rank, self._on_frame) if rank else None
        self._collector = Collector(world_size=world_size, timeout_s=timeout_s)
        self._loop = asyncio.SelectorEventLoop()
        self._wakeup = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    # --- from any thread -------------------------------------------------------------------------

    def send(self, part: PartialRecord) -> None:
        """Send this rank's measurements; the phases of a step come before the step itself."""
        self._submit(lambda: self._send(part))

    def announce(self, full_step: int) -> None:
        """On rank 0: have all ranks measure this step in full."""
        self._submit(lambda: self._broadcast(full_step=full_step))

    def raise_on_all(self, message: str) -> None:
        """On rank 0: have all ranks raise at the end of the same step."""
        self._submit(lambda: self._request_answers(message))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send queued records and end; rank 0 waits for late ranks. Idempotent.

        It takes ``timeout_s`` and two more seconds at most.
        """
        if not self.is_in_own_process:
            return
        self._close_at = min(self._close_at, time.monotonic() + timeout_s)
        self._submit(self._closing.set)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + _LAST_S)

    @property
    def is_in_own_process(self) -> bool:
        return os.getpid() == self._pid

    def _submit(self, callback: Callable[[], None]) -> None:
        if self.is_in_own_process:
            with suppress(RuntimeError):  # the thread has ended
                self._loop.call_soon_threadsafe(self._do, callback)

    # --- on the channel's thread -----------------------------------------------------------------

    def _run(self) -> None:
        with self._failures.contained("to end the exchange with other ranks"):
            self._loop.run_until_complete(self._live())
        self.barrier.decide(self._announcement.raise_at)
        self._loop.close()

    async def _live(self) -> None:
        connection = asyncio.create_task(self._connect())
        while not self._closing.is_set():
            await self._turn()
        await self._end(connection)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _connect(self) -> None:
        with self._failures.contained("to connect to the other ranks"):
            if self._client is not None:
                await self._client.run()
                return
            while not distributed.is_initialized():
                await asyncio.sleep(IDLE_S)
            with suppress(RuntimeError, OSError, ValueError):  # the collector logs who is missing
                listening, token = await in_thread(self._rendezvous.publish)
                self._server = Server(listening, token, self._receive, encode(self._announcement))
                await self._server.run()

    def _do(self, callback: Callable[[], None]) -> None:
        with self._failures.contained("to exchange records with other ranks"):
            callback()
        self._wakeup.set()

    async def _turn(self, *, hurry: bool = False) -> None:
        """Send or merge queued records, after a moment in which more may come."""
        await is_set_within(0 if hurry else IDLE_S, self._wakeup)
        await asyncio.sleep(0 if self._closing.is_set() else TURN_S)
        self._wakeup.clear()
        with self._failures.contained("to exchange records with other ranks"):
            turned_at, self._turned_at = self._turned_at, time.monotonic()
            self._now += min(self._turned_at - turned_at, _LONGEST_TURN_S)
            own, self._own = self._own, []
            if self._client is not None:
                if own:
                    self._client.put(RECORDS, encode(tuple(own)))
                return
            for part in own:
                self._collector.add(part, self._now)
            while (step := self._collector.take(self._now, hurry=hurry)) is not None:
                if not step.phase:
                    self._collector.log_missing(step, self._server.refused if self._server else ())
                with self._failures.contained("to record a merged step"):
                    self._deliver(step)
            self._decide()

    def _send(self, part: PartialRecord) -> None:
        last_of_step = self._epoch + (part.step + 1) * PER_STEP - 1
        if last_of_step <= self._last:  # the run goes back to an earlier step
            self._epoch += EPOCH
            last_of_step += EPOCH
        first_of_step = last_of_step - PER_STEP + 1
        self._last = max(first_of_step, self._last + 1) if part.phase else last_of_step
        self._own.append(replace(part, sequence=self._last))

    async def _end(self, connection: asyncio.Task[None]) -> None:
        if self._client is not None:
            await self._turn(hurry=True)
            self._client.finish()
            await asyncio.wait({connection}, timeout=min(_SEARCH_S, self._left_s()))
            if self._client.is_known:
                await asyncio.wait({connection}, timeout=self._left_s())
            return
        while self._collector.open_steps and self._left_s():
            await self._turn()
        await self._turn(hurry=True)
        if self._server is not None:
            self._server.close()
            with suppress(asyncio.TimeoutError):  # the store may block
                await asyncio.wait_for(in_thread(self._rendezvous.delete), _LAST_S / 2)

    def _left_s(self) -> float:
        return max(0.0, self._close_at - time.monotonic())

    # --- announcements ---------------------------------------------------------------------------

    def _on_frame(self, payload: bytes) -> None:
        announcement: Announcement = decode(Announcement, payload)
        if announcement != self._announcement:
            self._do(lambda: self._follow(announcement))

    def _follow(self, announcement: Announcement) -> None:
        self._announcement = announcement
        self._on_announcement(announcement)  # first: the training thread may need it at once
        if announcement.message:
            step = self.barrier.close()
            if self._client is None:
                self._answers[0] = step
            elif announcement.raise_at is None:
                self._client.put(BARRIER, str(step).encode())
        if announcement.raise_at is not None:
            self.barrier.decide(announcement.raise_at)

    # --- on rank 0 -------------------------------------------------------------------------------

    def _receive(self, kind: bytes, payload: bytes, rank: int) -> None:
        """Take a frame of another rank; a damaged one is reported and dropped."""
        self._do(lambda: self._collect(kind, payload, rank))

    def _collect(self, kind: bytes, payload: bytes, rank: int) -> None:
        self._collector.note(rank, self._now, LAST_SEQUENCE if kind == ENDED else -1)
        if kind == RECORDS:
            for part in decode(tuple[PartialRecord, ...], payload):
                self._collector.add(part, self._now)
        elif kind == BARRIER:
            self._answers[rank] = int(payload)

    def _broadcast(self, **changes: object) -> None:
        announcement = replace(self._announcement, **changes)  # type: ignore[arg-type]
        if self._server is not None:
            self._server.announce(encode(announcement))
        self._follow(announcement)

    def _request_answers(self, message: str) -> None:
        if not self._announcement.message:
            self._asked_at = self._now
            self._broadcast(message=message)

    def _decide(self) -> None:
        """Broadcast the step at which all raise, once all ranks have answered or timed out."""
        if self._asked_at < math.inf and self._announcement.raise_at is None:
            late = self._now - self._asked_at > ANSWER_S
            if late or self._collector.members <= self._answers.keys():
                self._broadcast(raise_at=max(self._answers.values()))

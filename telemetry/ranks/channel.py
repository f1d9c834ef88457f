"""Exchange of measurements between ranks: every rank sends to rank 0, which merges.

No collective takes part, no process group is made, and only background threads wait, each time for
a bounded time and with bounded memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import distributed

from telemetry.failures import Failures
from telemetry.ranks.barrier import ANSWER_S, Barrier
from telemetry.ranks.codec import FORMAT, decode, encode
from telemetry.ranks.collector import ENDED, Collector
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.partial_record import PartialRecord
from telemetry.ranks.rendezvous import Rendezvous, in_thread
from telemetry.ranks.streams import RECORDS, Client, Server, is_set_within

# Sequence numbers of a step: the last is its own and the others are of phases before it. A run that
# goes back to an earlier step begins another epoch of the sequence.
PER_STEP = 2**10
EPOCH = PER_STEP * 2**34

# Time without a message after which a rank is unresponsive.
TIMEOUT_S = 10.0

CLOSE_S = 20.0
TURN_S, IDLE_S = 0.02, 0.2
"""Time in which records gather to travel together, and interval of checks for timeouts."""
_SEARCH_S = 5.0
_LAST_S = 2.0

# Small records travel together up to here.
FRAME_BYTES = 2**20

# A pause longer than this was a stop of the process, and no other rank was late.
_LONGEST_TURN_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Announcement:
    """State of rank 0 for all other ranks; each version replaces the one before."""

    first_step: int | None = None  # of rank 0; None: it has not connected yet
    full_step: int = -1  # latest full step that is not in the schedule
    message: str = ""  # what all are about to raise: none passes the end of its step before ...
    raise_at: int | None = None  # ... it knows the step at whose end they do


@dataclass(frozen=True, kw_only=True)
class RankState:
    """State of another rank for rank 0, likewise."""

    format: str = FORMAT
    barrier: int | None = None  # step whose end its training thread does not pass
    ended: bool = False  # nothing else comes


class Channel:
    """Connects the loggers of one run on all ranks, on a separate thread.

    The ranks meet as soon as there is a default process group; until then, records wait. A forked
    child ignores everything.

    On its thread, rank 0 calls ``deliver`` with each step, in order; and each rank calls
    ``on_announcement`` with each version. The training thread asks ``barrier`` at the end of each
    step whether to raise.

    Args:
        name: The same for the loggers of one run on all ranks, and for no other logger.
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
        self._rank = rank
        self._world_size = world_size
        self._deliver = deliver
        self._on_announcement = on_announcement
        self._failures = failures
        self._now, self._turned_at = 0.0, time.monotonic()
        self._epoch, self._last = 0, -1
        self._own: list[PartialRecord] = []  # to be sent or merged
        self._announcement = Announcement() if rank else Announcement(first_step=first_step)
        self._state = RankState()
        self._asked_at = math.inf  # to raise
        self._answers: dict[int, int] = {}
        self._pid = os.getpid()
        self._closing = asyncio.Event()
        self._close_at = math.inf
        self.barrier = Barrier(first_step)
        self._rendezvous = Rendezvous(hashlib.sha256(name.encode()).hexdigest()[:16])
        self._server: Server | None = None
        self._client = Client(self._rendezvous, rank, self._on_frame) if rank else None
        self._collector = Collector(world_size=world_size, timeout_s=timeout_s)
        self._loop = asyncio.SelectorEventLoop()
        self._woken = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry-ranks", daemon=True)
        self._thread.start()

    # --- from any thread -------------------------------------------------------------------------

    def send(self, part: PartialRecord) -> None:
        """Send this rank's measurements; the phases of a step come before the step itself."""
        self._submit(lambda: self._send(part))

    def announce(self, full_step: int) -> None:
        """Have all ranks measure this step in full; on rank 0."""
        self._submit(lambda: self._broadcast(replace(self._announcement, full_step=full_step)))

    def raise_on_all(self, message: str) -> None:
        """Have all ranks raise at the end of the same step; on rank 0."""
        self._submit(lambda: self._ask_all(message))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Send queued records and end. Idempotent.

        Rank 0 waits for the other ranks' parts of its steps as long as for any late rank, and in
        all ``timeout_s`` at most; then there are two seconds more.
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
        connecting = asyncio.create_task(self._connect())
        while not self._closing.is_set():
            await self._turn()
        await self._end(connecting)
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _connect(self) -> None:
        with self._failures.contained("to connect to the other ranks"):
            if self._client is not None:
                await self._client.run(_SEARCH_S)
                return
            while not distributed.is_initialized():
                await asyncio.sleep(IDLE_S)
            with suppress(RuntimeError, OSError, ValueError):  # it stays alone, and logs it
                listening, token = await in_thread(self._rendezvous.publish)
                self._server = Server(listening, token, self._receive, encode(self._announcement))
                await self._server.run()

    def _do(self, callback: Callable[[], None]) -> None:
        with self._failures.contained("to exchange records with other ranks"):
            callback()
        self._woken.set()

    async def _turn(self, *, hurry: bool = False) -> None:
        """Send or merge what there is, after a moment in which more may come."""
        await is_set_within(0 if hurry else IDLE_S, self._woken)
        await asyncio.sleep(0 if self._closing.is_set() else TURN_S)
        self._woken.clear()
        with self._failures.contained("to exchange records with other ranks"):
            turned_at, self._turned_at = self._turned_at, time.monotonic()
            self._now += min(self._turned_at - turned_at, _LONGEST_TURN_S)
            own, self._own = self._own, []
            if self._client is not None:
                for records in _frames(own):
                    self._client.put(encode(records))
                return
            for part in own:
                self._collector.add(part, self._now)
            while (step := self._collector.take(self._now, hurry=hurry)) is not None:
                if not step.phase:
                    self._collector.log_missing(step, self._server.refused if self._server else ())
                with self._failures.contained("to record what the ranks measured"):
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

    async def _end(self, connecting: asyncio.Task[None]) -> None:
        if self._client is not None:
            await self._turn(hurry=True)
            self._client.finish(encode(replace(self._state, ended=True)))
            await asyncio.wait({connecting}, timeout=max(0, self._close_at - time.monotonic()))
            return
        while self._collector.waiting and time.monotonic() < self._close_at:
            await self._turn()
        await self._turn(hurry=True)
        if self._server is not None:
            self._server.close()
            with suppress(asyncio.TimeoutError):  # the store may be silent
                await asyncio.wait_for(in_thread(self._rendezvous.delete), _LAST_S / 2)

    # --- on other ranks --------------------------------------------------------------------------

    def _on_frame(self, payload: bytes) -> None:
        announcement: Announcement = decode(Announcement, payload)
        if announcement != self._announcement:
            self._do(lambda: self._take(announcement))

    def _take(self, announcement: Announcement) -> None:
        """Follow an announcement."""
        self._announcement = announcement
        self._on_announcement(announcement)  # first: the training thread may need it at once
        if announcement.message:
            step = self.barrier.close()
            if self._client is not None:
                self._state = RankState(barrier=step)
                self._client.set_state(encode(self._state))
            else:
                self._answers[self._rank] = step
        if announcement.raise_at is not None:
            self.barrier.decide(announcement.raise_at)

    # --- on rank 0 -------------------------------------------------------------------------------

    def _receive(self, kind: bytes, payload: bytes, rank: int) -> None:
        """A frame of another rank; a damaged one is reported and dropped."""
        if not 0 < rank < self._world_size:
            raise ValueError(f"rank {rank} is not part of this run")
        self._do(lambda: self._collect(kind, payload, rank))

    def _collect(self, kind: bytes, payload: bytes, rank: int) -> None:
        if kind == RECORDS:
            self._collector.note(rank, self._now)
            for part in decode(tuple[PartialRecord, ...], payload):
                if part.rank == rank:
                    self._collector.add(part, self._now)
            return
        state: RankState = decode(RankState, payload)
        if state.format != FORMAT:
            self._failures.log_once(
                f"rank {rank} sends {state.format} and rank 0 reads {FORMAT}; install the same "
                "version of telemetry on every host"
            )
            return
        self._collector.note(rank, self._now, ENDED if state.ended else -1)
        if state.barrier is not None:
            self._answers[rank] = state.barrier

    def _broadcast(self, announcement: Announcement) -> None:
        if self._server is not None:
            self._server.announce(encode(announcement))
        self._take(announcement)

    def _ask_all(self, message: str) -> None:
        if not self._announcement.message:
            self._asked_at = self._now
            self._broadcast(replace(self._announcement, message=message))

    def _decide(self) -> None:
        """Announce where all raise, once all have answered or had their time."""
        if self._asked_at < math.inf and self._announcement.raise_at is None:
            late = self._now - self._asked_at > ANSWER_S
            if late or self._collector.members <= self._answers.keys():
                raise_at = max(self._answers.values())
                self._broadcast(replace(self._announcement, raise_at=raise_at))


def _frames(parts: Iterable[PartialRecord]) -> Iterator[tuple[PartialRecord, ...]]:
    """Small records that follow each other, in one frame."""
    some: list[PartialRecord] = []
    nbytes = 0
    for part in parts:
        nbytes += part.nbytes
        if some and nbytes > FRAME_BYTES:
            yield tuple(some)
            some, nbytes = [], part.nbytes
        some.append(part)
    if some:
        yield tuple(some)

"""Collector of the ranks' records on rank 0; barrier at which all ranks raise an alert."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from telemetry.plain_text import ranks_in_words
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.rank_record import RankRecord

log = logging.getLogger("telemetry")

# Time for rank 0 to decide.
BARRIER_S = 30.0


class Barrier:
    """One rank's side of the barrier.

    If one rank raised alone, the others would block in their next collective. So each exchange
    closes the barrier, without waiting for the training thread, which may be in a collective: the
    thread does not pass the end of its current step, and rank 0 receives its number. Rank 0 decides
    for the largest number, and every rank raises at the end of that step. Ranks that do not answer
    in 10 s raise as soon as they can; without a decision in :data:`BARRIER_S`, training continues.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._ended = first_step - 1
        self._closed = self._over = False
        self._raise_at: int | None = None
        self._decided = threading.Event()

    def step_ended(self, step: int | None) -> bool:
        """Return whether to raise after this step, the last if None; wait at a closed barrier."""
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


MAX_BYTES = 256 * 2**20

# Larger than the sequence number of any record: the rank has ended.
LAST_SEQUENCE = 2**62


class Collector:
    """Merges the ranks' records of each step, in the order of the steps, each rank at most once.

    Each rank sends its records by ascending sequence numbers, so a step is complete when every rank
    has sent it or a later one: ranks with different intervals do not delay each other. If a rank
    sends nothing for ``timeout_s``, or the collected measurements exceed ``max_bytes``, the step
    ends without it. The rank is then unresponsive, and later steps do not wait for it until it
    sends something. The first step waits as long for ranks that have not connected yet.
    """

    def __init__(self, *, world_size: int, timeout_s: float, max_bytes: int = MAX_BYTES) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes
        # Steps that are not complete, by sequence number, and since when.
        self.open: dict[int, tuple[MergedStep, float]] = {}
        self._ended = -1
        self._last = np.full(world_size, -1, np.int64)  # sequence number
        self._received = np.full(world_size, -np.inf)  # time of the latest message
        self._unresponsive = np.zeros(world_size, np.bool_)
        self._logged: defaultdict[str, frozenset[int]] = defaultdict(frozenset)

    @property
    def members(self) -> frozenset[int]:
        """Ranks that sent something, have not ended and are responsive."""
        return _ranks((self._received >= 0) & (self._last < LAST_SEQUENCE) & ~self._unresponsive)

    @property
    def unresponsive(self) -> frozenset[int]:
        """Ranks that sent something, have not ended and timed out."""
        return _ranks((self._received >= 0) & (self._last < LAST_SEQUENCE) & self._unresponsive)

    def note(self, rank: int, now: float, sequence: int = -1) -> None:
        """Note that a rank sent something, and the sequence number of its record."""
        self._received[rank] = now
        self._unresponsive[rank] = False
        self._last[rank] = max(self._last[rank], sequence)

    def add(self, part: RankRecord, now: float) -> None:
        """Add a record of a rank; drop it if the rank sent it before, or its step has ended."""
        is_new = self._last[part.rank] < part.sequence > self._ended
        self.note(part.rank, now, part.sequence)
        if is_new and part.sequence in self.open:
            self.open[part.sequence][0].add(part)
        elif is_new:
            self.open[part.sequence] = MergedStep(part), now

    def take(self, now: float, *, hurry: bool = False) -> MergedStep | None:
        """Return the next step that is complete or timed out, or any in a hurry; None: no step."""
        if not self.open:
            return None
        first = min(self.open)
        step, since = self.open[first]
        awaited = (self._last < first) & ~self._unresponsive
        is_late = now - np.maximum(self._received, since) >= self._timeout_s
        is_awaited = not hurry and (awaited & ~is_late).any()
        if is_awaited and sum(o.nbytes for o, _ in self.open.values()) <= self._max_bytes:
            return None
        self._unresponsive |= awaited & (is_late | (self._received >= 0))
        self._ended = max(self._ended, first)
        del self.open[first]
        return step

    def log_missing(self, step: MergedStep) -> None:
        """Log once which ranks a step lacks and why, and once which return."""
        here, hold = step.parts.keys(), f"from step {step.step} on, the records hold"
        missed = f"{hold} {len(here)} of {len(self._last)} ranks:"
        for kind, ranks, message in (
            (
                "missed",
                _ranks(self._received < 0) - here,
                f"{missed} %s made no HookLogger for this run, or by another version of telemetry",
            ),
            (
                "missed",
                self.unresponsive - here,
                f"{missed} %s sent nothing in time, due to fewer batches, a hang or a crash",
            ),
            ("back", self._logged["missed"] & here, f"{hold} what %s measured"),
            (
                "skipped",
                self.members - here,
                f"step {step.step} was measured by {ranks_in_words(here)}, and not by %s, which "
                "skipped it, had too much to send, or has another first_step (with resume=True, "
                "each rank needs to read the directory of the run)",
            ),
        ):
            if new := ranks - self._logged[kind]:
                self._logged[kind] |= new
                log.warning(f"telemetry: {message}", ranks_in_words(new))


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

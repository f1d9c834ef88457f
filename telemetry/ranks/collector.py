"""Collects on rank 0 the parts of each step, until it is complete or has waited long enough."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from telemetry.plain_text import ranks_in_words
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.partial_record import PartialRecord

log = logging.getLogger("telemetry")

MAX_BYTES = 256 * 2**20

ENDED = 2**62
"""Sequence number past those of all records: the rank sends nothing else."""


class Collector:
    """Merges the parts of each step, in the order of the steps, each rank at most once.

    Each rank sends its records in the order of their sequence numbers, so a step does not wait for
    a rank that has sent a later one: ranks with different intervals do not hold each other up. A
    step is complete when no rank is left that may still send it. Otherwise it ends when these ranks
    have sent nothing for ``timeout_s``, or above ``max_bytes``. They are then unresponsive, and
    later steps do not wait for them until they send something.

    Args:
        timeout_s: Also the time after the first message during which each step waits for all ranks
            of the world, because some may not have connected yet.
        max_bytes: Limit of the collected measurements.
    """

    def __init__(self, *, world_size: int, timeout_s: float, max_bytes: int = MAX_BYTES) -> None:
        self._timeout_s = timeout_s
        self._start_ends = np.inf
        self._max_bytes = max_bytes
        self._open: dict[int, MergedStep] = {}
        self._since: dict[int, float] = {}
        self._bytes = 0
        self._ended = -1
        self._last = np.full(world_size, -1, np.int64)  # sequence number
        self._received = np.full(world_size, -np.inf)  # time of the latest message
        self._unresponsive = np.zeros(world_size, np.bool_)
        self._logged: defaultdict[str, frozenset[int]] = defaultdict(frozenset)

    @property
    def members(self) -> frozenset[int]:
        """Ranks that sent something, have not ended and are responsive."""
        return _ranks((self._received >= 0) & (self._last < ENDED) & ~self._unresponsive)

    @property
    def unresponsive(self) -> frozenset[int]:
        """Ranks that have not ended, and that a step did not wait for any longer."""
        return _ranks((self._last < ENDED) & self._unresponsive)

    @property
    def waiting(self) -> int:
        """Number of steps that are not complete."""
        return len(self._open)

    def note(self, rank: int, now: float, sequence: int = -1) -> None:
        """A rank sent something; the sequence number is that of its record."""
        self._received[rank] = now
        self._unresponsive[rank] = False
        self._last[rank] = max(self._last[rank], sequence)
        self._start_ends = min(self._start_ends, now + self._timeout_s)

    def add(self, part: PartialRecord, now: float) -> None:
        """Add a rank's part; drop it if the rank sent it before, or its step has ended."""
        is_new = part.sequence > self._last[part.rank]
        self.note(part.rank, now, part.sequence)
        if not is_new or part.sequence <= self._ended:
            return
        if (step := self._open.get(part.sequence)) is None:
            step = self._open[part.sequence] = MergedStep(part)
            self._since[part.sequence] = now
            self._bytes += step.nbytes
        else:
            self._bytes -= step.nbytes
            try:
                step.add(part)
            finally:
                self._bytes += step.nbytes

    def take(self, now: float, *, hurry: bool = False) -> MergedStep | None:
        """The next step that is complete by now or has waited long enough; None: no step is.

        Args:
            now: Time of a clock that stands while this process is stopped, from 0.
            hurry: Do not wait.
        """
        if not self._open:
            return None
        first = min(self._open)
        awaited = (self._last < first) & ~self._unresponsive
        if now >= self._start_ends:
            awaited &= self._received >= 0
        waited_s = now - np.maximum(self._received[awaited], self._since[first])
        if (waited_s < self._timeout_s).any() and self._bytes <= self._max_bytes and not hurry:
            return None
        self._unresponsive |= awaited & (self._received >= 0)
        self._ended = max(self._ended, first)
        del self._since[first]
        step = self._open.pop(first)
        self._bytes -= step.nbytes
        return step

    def log_missing(self, step: MergedStep, refused: Collection[int] = ()) -> None:
        """Log once which ranks a step lacks and why, and once which return."""
        here, hold = step.ranks, f"from step {step.step} on, the records hold"
        lack = f"{hold} {len(here)} of {len(self._last)} ranks: %s"
        unknown = _ranks(self._received < 0)
        for ranks, reason in (
            (
                unknown & frozenset(refused),
                "cannot connect, as rank 0 may not open more files; raise ulimit -n there to twice "
                'the number of ranks, or use ranks="each"',
            ),
            (unknown.difference(refused), "made no HookLogger for this run"),
            (
                self.unresponsive,
                "sent nothing in time: they ended with fewer batches, hang or died",
            ),
        ):
            self._log("missed", ranks - here, f"{lack} {reason}")
        self._log("back", self._logged["missed"] & here, f"{hold} what %s measured")
        self._log(
            "elsewhere",
            self.members - here,
            f"step {step.step} was measured by {ranks_in_words(here)}, and not by %s, which "
            "skipped it or had too much to send",
        )

    def _log(self, kind: str, ranks: frozenset[int], message: str) -> None:
        if new := ranks - self._logged[kind]:
            self._logged[kind] |= new
            log.warning(f"telemetry: {message}", ranks_in_words(new))


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

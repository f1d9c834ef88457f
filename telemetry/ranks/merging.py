"""Merging of the ranks' measurements of each step: each column has one reduction over ranks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.plain_text import ranks_in_words
from telemetry.ranks.partial_record import (
    FIGURES,
    Array,
    Floats,
    ParameterPart,
    PartialRecord,
    Row,
    TensorTable,
)
from telemetry.records import Spread
from telemetry.records.moments import rms_of
from telemetry.records.rows import Rows

log = logging.getLogger("telemetry")

MAX_BYTES = 256 * 2**20

# Larger than the sequence number of any record: the rank has ended.
LAST_SEQUENCE = 2**62

NOWHERE = np.iinfo(np.int64).max
"""Number of the copy where a rank has none."""

# Tables of tensors that are merged at once: more are faster, and take more memory.
_TABLES_AT_ONCE = 8

Key = TypeVar("Key", bound=Hashable)
Placed: TypeAlias = tuple[ParameterPart, NDArray[np.intp]]
"""The parameters of a rank's part of the model, and their positions in the whole."""


def merge_parameters(parts: Sequence[Placed], count: int) -> dict[str, Array]:
    """Return the columns of all parameters by name; without those that no rank measured.

    Args:
        parts: Each with the positions of its parameters in the whole.
        count: Number of parameters in the whole.
    """

    def stack(name: str, missing: Any) -> Array:
        stacked = np.full((len(some), count), missing)
        for row, (part, at) in zip(stacked, some, strict=True):
            row[at] = part.columns[name]
        return stacked

    merged: dict[str, Array] = {}
    for name, (copies, reduction, missing) in FIGURES.items():
        if some := [(part, at) for part, at in parts if name in part.columns]:
            numbers = stack(copies, NOWHERE)
            counts = (numbers == numbers.min(axis=0)) & (numbers < NOWHERE)
            values = reduction(stack(name, missing), where=counts)
            merged[name] = np.where(counts.any(axis=0), values, missing)
    return merged


def merge_tensors(tables: Sequence[TensorTable]) -> TensorTable:
    """Merge tables, in any order, into the one of a rank that had all tensors."""
    if len(tables) == 1:
        return tables[0]
    index: dict[Row, int] = {}
    for table in tables:
        for row in table.rows:
            index.setdefault(row, len(index))
    at = [np.array([index[row] for row in table.rows], np.int64) for table in tables]
    copies, calls = np.full(len(index), NOWHERE), np.zeros(len(index), np.int64)
    for table, places in zip(tables, at, strict=True):
        copies[places] = np.minimum(copies[places], table.copies)
    for n, (table, places) in enumerate(zip(tables, at, strict=True)):
        counts = table.copies == copies[places]
        calls[places] = np.maximum(calls[places], np.where(counts, table.content.calls, 0))
        at[n] = np.where(counts, places, -1)
    content = Rows.concatenate([table.content for table in tables])
    return TensorTable(
        rows=tuple(index),
        copies=copies,
        content=content.merged(np.concatenate(at), len(index)).having(calls=calls),
    )


def sum_addends(parts: Iterable[Placed]) -> dict[int, Floats]:
    """Return sums of addends by position of the parameter; of several copies the lowest counts."""
    found: dict[tuple[int, int, int], list[Floats]] = {}
    for part, at in parts:
        for index, copy, values in part.addends:
            found.setdefault((int(at[index]), copy, values.size), []).append(values)
    lowest = {key[0]: key for key in sorted(found, reverse=True)}
    return {index: reduce(np.add, found[key]) for index, key in lowest.items()}


def over_ranks(
    of_ranks: Mapping[int, Mapping[Key, float]],
) -> tuple[dict[Key, float], dict[Key, Spread]]:
    """Return means of values over the ranks that have them, and their extremes except for NaN.

    Of equal extremes the lowest rank's counts.
    """
    ranks = sorted(of_ranks)
    names = list(dict.fromkeys([name for rank in ranks for name in of_ranks[rank]]))
    if not names:
        return {}, {}
    logged = np.array([[name in of_ranks[rank] for name in names] for rank in ranks])
    values = np.array([[of_ranks[rank].get(n, np.nan) for n in names] for rank in ranks])
    means = np.add.reduce(values, axis=0, where=logged) / logged.sum(axis=0)
    least = values.argsort(axis=0, kind="stable")[0]  # NaN comes last
    most = (-values).argsort(axis=0, kind="stable")[0]
    return dict(zip(names, means.tolist(), strict=True)), {
        name: Spread(low=float(own[a]), low_rank=ranks[a], high=float(own[b]), high_rank=ranks[b])
        for name, own, a, b in zip(names, values.T, least, most, strict=True)
        if not np.isnan(own[a])
    }


class MergedStep:
    """Measurements of several ranks at one step, or in one phase of it.

    Tensors are merged as they arrive; everything else is small and is kept as it is.

    Attributes:
        parts: Of the ranks, without tensors.
        rms: Root mean squares of outputs, by rank.
        nbytes: Bytes of the large arrays.
    """

    def __init__(self, first: PartialRecord) -> None:
        self.step, self.phase, self.sequence = first.step, first.phase, first.sequence
        self.parts: list[PartialRecord] = []
        self.rms: dict[int, dict[Row, float]] = {}
        self._tables: list[TensorTable] = []
        self._ranks: set[int] = set()
        self.nbytes = 0
        self.add(first)

    def add(self, part: PartialRecord) -> None:
        """Add the measurements of another rank.

        Raises:
            ValueError: They are of another step, or this rank has sent it before.
        """
        if (part.step, part.phase) != (self.step, self.phase) or part.rank in self._ranks:
            raise ValueError(f"rank {part.rank} sent step {part.step} out of order")
        self._ranks.add(part.rank)
        self.nbytes += part.nbytes
        self.parts.append(replace(part, tensors=None))
        if part.tensors is not None:
            rms = zip(part.tensors.rows, rms_of(part.tensors.content).tolist(), strict=True)
            self.rms[part.rank] = {row: value for row, value in rms if row.kind == "outputs"}
            self._tables.append(part.tensors)
        if len(self._tables) == _TABLES_AT_ONCE:
            self.nbytes -= sum(table.nbytes for table in self._tables)
            self._tables = [merge_tensors(self._tables)]
            self.nbytes += self._tables[0].nbytes

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose measurements are here."""
        return frozenset(self._ranks)

    @property
    def wall_time(self) -> float:
        """Time at which the last rank ended the step."""
        return max(part.wall_time for part in self.parts)

    @property
    def measured(self) -> frozenset[int]:
        """Ranks that measured the step in full."""
        return frozenset([part.rank for part in self.parts if part.full])

    def tensors(self) -> TensorTable | None:
        """All tensors, merged; None: no rank has measured any."""
        return merge_tensors(self._tables) if self._tables else None

    def scalars(self) -> tuple[dict[str, float], dict[str, Spread]]:
        """Means of logged scalars over the ranks that logged them, and their spreads."""
        return over_ranks({part.rank: part.scalars for part in self.parts})

    def usage(self) -> tuple[dict[str, float], dict[str, Spread]]:
        """Means of times and memory over the ranks that measured them, and their spreads."""
        return over_ranks({part.rank: part.usage for part in self.parts})


class Collector:
    """Merges the partial records of each step, in the order of the steps, each rank at most once.

    Each rank sends its records by ascending sequence numbers, so a step is complete when every rank
    has sent it or a later one: ranks with different intervals do not delay each other. If a rank
    sends nothing for ``timeout_s``, or above ``max_bytes``, the step ends without it. The rank is
    then unresponsive, and later steps do not wait for it until it sends something.

    Args:
        timeout_s: Also the time after the first message during which each step waits for all ranks
            of the world, because some may not have connected yet.
        max_bytes: Limit of the collected measurements.
    """

    def __init__(self, *, world_size: int, timeout_s: float, max_bytes: int = MAX_BYTES) -> None:
        self._timeout_s = timeout_s
        self._start_ends = np.inf
        self._max_bytes = max_bytes
        self._open: dict[int, tuple[MergedStep, float]] = {}  # by sequence number; since when
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
        """Ranks that have not ended and timed out."""
        return _ranks((self._last < LAST_SEQUENCE) & self._unresponsive)

    @property
    def open_steps(self) -> int:
        """Number of steps that are not complete."""
        return len(self._open)

    def note(self, rank: int, now: float, sequence: int = -1) -> None:
        """Note that a rank sent something, and the sequence number of its record."""
        self._received[rank] = now
        self._unresponsive[rank] = False
        self._last[rank] = max(self._last[rank], sequence)
        self._start_ends = min(self._start_ends, now + self._timeout_s)

    def add(self, part: PartialRecord, now: float) -> None:
        """Add a partial record; drop it if the rank sent it before, or its step has ended."""
        is_new = self._last[part.rank] < part.sequence > self._ended
        self.note(part.rank, now, part.sequence)
        if is_new and part.sequence in self._open:
            self._open[part.sequence][0].add(part)
        elif is_new:
            self._open[part.sequence] = MergedStep(part), now

    def take(self, now: float, *, hurry: bool = False) -> MergedStep | None:
        """Return the next step that is complete or timed out; None: no step is.

        Args:
            now: Time of a clock that stands while this process is stopped, from 0.
            hurry: Do not wait.
        """
        if not self._open:
            return None
        first = min(self._open)
        step, since = self._open[first]
        awaited = (self._last < first) & ~self._unresponsive
        if now >= self._start_ends:
            awaited &= self._received >= 0
        waited_s = now - np.maximum(self._received[awaited], since)
        is_awaited = not hurry and (waited_s < self._timeout_s).any()
        if is_awaited and sum(o.nbytes for o, _ in self._open.values()) <= self._max_bytes:
            return None
        self._unresponsive |= awaited & (self._received >= 0)
        self._ended = max(self._ended, first)
        del self._open[first]
        return step

    def log_missing(self, step: MergedStep, refused: Collection[int] = ()) -> None:
        """Log once which ranks a step lacks and why, and once which return."""
        here, hold = step.ranks, f"from step {step.step} on, the records hold"
        unknown = _ranks(self._received < 0)
        for ranks, reason in (
            (
                unknown & frozenset(refused),
                "cannot connect, as rank 0 may not open more files; raise ulimit -n there to twice "
                'the number of ranks, or use ranks="each"',
            ),
            (
                unknown.difference(refused),
                "made no HookLogger for this run, or have another version of telemetry",
            ),
            (
                self.unresponsive,
                "sent nothing in time: they ended with fewer batches, hang or died",
            ),
        ):
            message = f"{hold} {len(here)} of {len(self._last)} ranks: %s {reason}"
            self._log("missed", ranks - here, message)
        self._log("back", self._logged["missed"] & here, f"{hold} what %s measured")
        self._log(
            "skipped",
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

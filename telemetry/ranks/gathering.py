"""Puts together what several ranks measured at the same step, however late some of them are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.part import Kind, Part

Merge = Callable[[Sequence[bytes]], bytes]
"""Makes one payload of several, in any order and grouping."""

MAX_BYTES = 256 * 2**20


class RunningClock:
    """Seconds during which this process ran: a time for which it was stopped hardly counts.

    After such a time what others sent has yet to be read, and nobody else was late.
    """

    def __init__(self, longest_step_s: float = 1.0) -> None:
        self._longest_step_s = longest_step_s
        self._read = time.monotonic()
        self._now = 0.0

    def now(self) -> float:
        """To be asked at least once per ``longest_step_s``."""
        read = time.monotonic()
        self._now += min(read - self._read, self._longest_step_s)
        self._read = read
        return self._now


@dataclass(kw_only=True, eq=False)
class _Open:
    since: float
    parts: list[Part] = field(default_factory=list)


class Gathering:
    """Collects the parts of each step and merges them, in the order of the steps.

    Each rank sends its steps in their order; at one place in it there may be several phases. So a
    rank that has sent a later step will not send an earlier one, and nobody waits for it: ranks
    that log at different intervals do not hold each other up. A step is complete when no rank is
    left that may still send it. Otherwise it ends when nothing has come from those ranks for
    ``patience_s``, or when too many bytes wait; they are not waited for again until something comes
    from them.

    No rank counts twice. If a part overlaps with others, because its sender did not know that they
    had arrived another way, the larger one stays.

    Args:
        patience_s: How long a step waits for a rank of which nothing comes.
        start_s: How long nothing is complete unless it holds all ranks of the world, because
            others may not have joined yet.
        forwards_late: Whether what comes after its step has ended is handed on by itself, because
            further on the step may not have ended yet. Otherwise it is left out.
        max_bytes: How many bytes may wait. If there are half as many, what is there of the next
            step is merged before the rest comes.
    """

    def __init__(
        self,
        *,
        world_size: int,
        merge: Merge,
        patience_s: float,
        start_s: float,
        forwards_late: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._merge = merge
        self._patience_s = patience_s
        self._start_s = start_s
        self._forwards_late = forwards_late
        self._max_bytes = max_bytes
        self._open: dict[tuple[int, str], _Open] = {}
        self._bytes = 0
        self._ended_place = -1
        self._ended_phases: set[str] = set()  # at that place
        self._stragglers: list[Part] = []
        self._last = np.full(world_size, -1, np.int64)
        self._heard = np.zeros(world_size)
        self._joined = np.zeros(world_size, np.bool_)
        self._left = np.zeros(world_size, np.bool_)
        self._silent = np.zeros(world_size, np.bool_)

    @property
    def members(self) -> frozenset[int]:
        """Ranks that take part: they have joined and not left, and are not silent."""
        return _ranks(self._joined & ~self._left & ~self._silent)

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that take part, and of which a step had to do without."""
        return _ranks(self._joined & ~self._left & self._silent)

    @property
    def never_joined(self) -> frozenset[int]:
        """Ranks of which nothing has come so far."""
        return _ranks(~self._joined & ~self._left)

    @property
    def waiting(self) -> int:
        """How many steps are not complete."""
        return len(self._open)

    def add(self, part: Part, now: float) -> None:
        index = np.fromiter(part.ranks, np.int64, len(part.ranks))
        self._heard[index] = now
        self._left[index] = part.kind == Kind.LEFT
        self._silent[index] = False
        if part.kind == Kind.LEFT:
            return
        self._joined[index] = True
        if part.kind != Kind.RECORD:
            return
        self._last[index] = np.maximum(self._last[index], part.place)
        if not self._has_ended(part):
            key = part.place, part.phase
            self._put(part, self._open.setdefault(key, _Open(since=now)).parts)
        elif self._forwards_late:
            self._stragglers.append(part)

    def take(self, now: float, *, hurry: bool = False) -> Part | None:
        """The next step that is complete by now or has waited long enough, merged.

        Args:
            now: Time of a clock that stands while this process is stopped, from 0.
            hurry: Wait for nobody.

        Returns:
            None if there is none. Call it until then; an exception of ``merge`` costs one step.
        """
        if self._stragglers:
            return self._stragglers.pop(0)
        if not self._open:
            return None
        key = min(self._open)
        if self._bytes > self._max_bytes / 2:
            self._merge_early(self._open[key])
        awaited = self._awaited(*key, now)
        waited_s = now - np.maximum(self._heard[awaited], self._open[key].since)
        if (waited_s < self._patience_s).any() and self._bytes <= self._max_bytes and not hurry:
            return None
        self._silent |= awaited & self._joined
        self._end(*key)
        return self._whole(self._open.pop(key).parts)

    def _awaited(self, place: int, phase: str, now: float) -> NDArray[np.bool_]:
        to_come = self._last < place
        if phase:  # who has sent another phase of the same step may still send this one
            to_come |= self._last == place
            for part in self._open[place, phase].parts:
                to_come[np.fromiter(part.ranks, np.int64, len(part.ranks))] = False
        to_come &= ~self._left & ~self._silent
        return to_come if now < self._start_s else to_come & self._joined

    def _has_ended(self, part: Part) -> bool:
        if part.place == self._ended_place:
            return part.phase in self._ended_phases
        return part.place < self._ended_place

    def _end(self, place: int, phase: str) -> None:
        if place > self._ended_place:
            self._ended_place, self._ended_phases = place, set()
        self._ended_phases.add(phase)

    def _put(self, part: Part, parts: list[Part]) -> None:
        overlapping = [other for other in parts if other.ranks & part.ranks]
        if not all(other.ranks <= part.ranks for other in overlapping):
            return
        for other in overlapping:
            parts.remove(other)
            self._bytes -= len(other.payload)
        parts.append(part)
        self._bytes += len(part.payload)

    def _merge_early(self, step: _Open) -> None:
        parts, step.parts = step.parts, []
        self._put(self._whole(parts), step.parts)

    def _whole(self, parts: list[Part]) -> Part:
        self._bytes -= sum(len(part.payload) for part in parts)
        if len(parts) == 1:
            return parts[0]
        return Part(
            place=parts[0].place,
            phase=parts[0].phase,
            ranks=frozenset().union(*(part.ranks for part in parts)),
            payload=self._merge([part.payload for part in parts]),
        )


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

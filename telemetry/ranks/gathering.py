"""Messages between ranks, and how those about one step are put together, however late some are."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

# Twice the steps that a run may have: see :class:`telemetry.ranks.channel.Order`.
LAP = 2**44


class Kind(IntEnum):
    RECORD = 0
    JOINED = 1
    LEFT = 2
    HELD = 3


@dataclass(frozen=True, kw_only=True)
class Message:
    """Something from some of the ranks, on its way to the first.

    Attributes:
        kind: What it is.
        place: Its place in the order of steps. Of ``HELD`` the step that a rank will not pass.
        phase: Name of a part of the run that is not training; there may be several at one place.
        ranks: From whom it is.
        payload: What they measured, merged; only of a record.
    """

    kind: Kind = Kind.RECORD
    place: int = 0
    phase: str = ""
    ranks: frozenset[int]
    payload: bytes = b""

    @property
    def step(self) -> int:
        """The step that has this place."""
        return self.place % LAP // 2

    def to_bytes(self) -> bytes:
        head = [self.kind, self.place, self.phase, sorted(self.ranks)]
        return json.dumps(head).encode() + b"\n" + self.payload

    @staticmethod
    def from_bytes(data: bytes) -> Message:
        """The inverse of :meth:`to_bytes`; ValueError: it is something else."""
        head, _, payload = data.partition(b"\n")
        kind, place, phase, ranks = json.loads(head)
        return Message(
            kind=Kind(kind), place=place, phase=phase, ranks=frozenset(ranks), payload=payload
        )


@dataclass(frozen=True, kw_only=True)
class News:
    """What the first rank tells all others; each version replaces the former.

    Attributes:
        first_step: At which the first rank began; None before it has told.
        full_steps: Steps that are measured in full although the schedule does not name them.
        hold: Whether every rank shall stop at the end of a step, since one is about to be chosen.
        raise_at: The step at whose end all raise; None if none is chosen.
        message: What they raise, as its owner writes it.
    """

    first_step: int | None = None
    full_steps: tuple[int, ...] = ()
    hold: bool = False
    raise_at: int | None = None
    message: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(data: bytes) -> News:
        found = json.loads(data)
        return News(**{**found, "full_steps": tuple(found["full_steps"])})


def ranges_of(ranks: Iterable[int]) -> str:
    """Ranks in words: ``0-3,7``."""
    runs = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        runs.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(runs)


def named(ranks: Collection[int]) -> str:
    """Ranks in a message: ``rank 7``, ``ranks 0-3``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges_of(ranks)}"


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
    messages: list[Message] = field(default_factory=list)


class Gathering:
    """Collects the messages of each step and merges them, in the order of the steps.

    Each rank sends its steps in their order; at one place in it there may be several phases. So a
    rank that has sent a later step will not send an earlier one, and nobody waits for it: ranks
    that log at different intervals do not hold each other up. A step is complete when no rank is
    left that may still send it. Otherwise it ends when nothing has come from those ranks for
    ``patience_s``, or when too many bytes wait; they are not waited for again until something comes
    from them.

    No rank counts twice. If a message overlaps with others, because its sender did not know that
    they had arrived another way, the larger one stays.

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
        self._stragglers: list[Message] = []
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

    def add(self, message: Message, now: float) -> None:
        index = np.fromiter(message.ranks, np.int64, len(message.ranks))
        self._heard[index] = now
        self._left[index] = message.kind == Kind.LEFT
        self._silent[index] = False
        if message.kind == Kind.LEFT:
            return
        self._joined[index] = True
        if message.kind != Kind.RECORD:
            return
        self._last[index] = np.maximum(self._last[index], message.place)
        if not self._has_ended(message):
            key = message.place, message.phase
            self._put(message, self._open.setdefault(key, _Open(since=now)).messages)
        elif self._forwards_late:
            self._stragglers.append(message)

    def take(self, now: float, *, hurry: bool = False) -> Message | None:
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
        return self._whole(self._open.pop(key).messages)

    def _awaited(self, place: int, phase: str, now: float) -> NDArray[np.bool_]:
        to_come = self._last < place
        if phase:  # who has sent another phase of the same step may still send this one
            to_come |= self._last == place
            for message in self._open[place, phase].messages:
                to_come[np.fromiter(message.ranks, np.int64, len(message.ranks))] = False
        to_come &= ~self._left & ~self._silent
        return to_come if now < self._start_s else to_come & self._joined

    def _has_ended(self, message: Message) -> bool:
        if message.place == self._ended_place:
            return message.phase in self._ended_phases
        return message.place < self._ended_place

    def _end(self, place: int, phase: str) -> None:
        if place > self._ended_place:
            self._ended_place, self._ended_phases = place, set()
        self._ended_phases.add(phase)

    def _put(self, message: Message, messages: list[Message]) -> None:
        overlapping = [other for other in messages if other.ranks & message.ranks]
        if not all(other.ranks <= message.ranks for other in overlapping):
            return
        for other in overlapping:
            messages.remove(other)
            self._bytes -= len(other.payload)
        messages.append(message)
        self._bytes += len(message.payload)

    def _merge_early(self, step: _Open) -> None:
        messages, step.messages = step.messages, []
        self._put(self._whole(messages), step.messages)

    def _whole(self, messages: list[Message]) -> Message:
        self._bytes -= sum(len(message.payload) for message in messages)
        if len(messages) == 1:
            return messages[0]
        return Message(
            place=messages[0].place,
            phase=messages[0].phase,
            ranks=frozenset().union(*(message.ranks for message in messages)),
            payload=self._merge([message.payload for message in messages]),
        )


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

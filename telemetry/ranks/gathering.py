"""Messages between ranks, and how what they measured at one step is put together, however late."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("telemetry")

# A step's place in the order of all is twice its number, plus one, so that its phases come before
# it. A run that goes back to an earlier step begins another lap; one that has ended is past all.
LAP = 2**44
END = 2**62

MAX_BYTES = 256 * 2**20
BLOCK_BYTES = 2**20
DECODED_AT_ONCE = 16


class Part(Protocol):
    """What ranks measured at one step."""

    @property
    def nbytes(self) -> int: ...


class Step(NamedTuple):
    """A step, or a phase before it: its place and name, and what these ranks measured there."""

    place: int
    phase: str
    ranks: frozenset[int]
    part: Any

    @property
    def step(self) -> int:
        return self.place % LAP // 2


@dataclass(frozen=True, kw_only=True)
class Message:
    """Something from some of the ranks, on its way to the first.

    Attributes:
        ranks: From whom it is.
        keys: Place and phase of each step that it holds.
        held: The step whose end they will not pass; -1 if they were not asked.
        payload: What they measured at these steps; nothing in a notice.
    """

    ranks: frozenset[int]
    keys: tuple[tuple[int, str], ...] = ()
    held: int = -1
    payload: bytes = b""

    @staticmethod
    def of(block: Sequence[Step], encode: Callable[[list[Any]], bytes]) -> Message:
        """What the same ranks measured at several steps."""
        keys = tuple((step.place, step.phase) for step in block)
        return Message(ranks=block[0].ranks, keys=keys, payload=encode([s.part for s in block]))

    def to_bytes(self) -> bytes:
        head = [sorted(self.ranks), self.keys, self.held]
        return json.dumps(head).encode() + b"\n" + self.payload

    @staticmethod
    def from_bytes(data: bytes) -> Message:
        """The inverse of :meth:`to_bytes`; ValueError: it is something else."""
        head, _, payload = data.partition(b"\n")
        ranks, keys, held = json.loads(head)
        keys = tuple((place, phase) for place, phase in keys)
        return Message(ranks=frozenset(ranks), keys=keys, held=held, payload=payload)


def blocks(steps: Iterable[Step]) -> Iterator[list[Step]]:
    """Steps that travel together: small ones of the same ranks that follow each other."""
    block: list[Step] = []
    nbytes = 0
    for step in steps:
        nbytes += step.part.nbytes
        if block and (step.ranks != block[0].ranks or nbytes > BLOCK_BYTES):
            yield block
            block, nbytes = [], step.part.nbytes
        block.append(step)
    if block:
        yield block


@dataclass(frozen=True, kw_only=True)
class News:
    """What the first rank tells all others; each version replaces the former.

    Attributes:
        first_step: At which the first rank began; None before it has told.
        full_steps: Steps that are measured in full although the schedule does not name them.
        message: What all are about to raise: none passes the end of its step before it knows where.
        raise_at: The step at whose end they do; None if it is not chosen.
    """

    first_step: int | None = None
    full_steps: tuple[int, ...] = ()
    message: str = ""
    raise_at: int | None = None

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


class _Arrived(NamedTuple):
    """What some ranks measured at a step that waits for others; it is decoded when it is needed."""

    ranks: frozenset[int]
    nbytes: int
    load: Callable[[], Any]


@dataclass(kw_only=True, eq=False)
class _Open:
    since: float
    arrived: list[_Arrived] = field(default_factory=list)


class Gathering:
    """Knows which ranks a step still waits for, and merges what they sent, step after step.

    Each rank sends its steps in their order; at one place in it there may be several phases. So a
    rank that has sent a later step will not send an earlier one, and nobody waits for it: ranks
    that log at different intervals do not hold each other up. A step is complete when no rank is
    left that may still send it. Otherwise it ends when nothing has come from those ranks for
    ``patience_s``, or when too many bytes wait; they are not waited for again until something comes
    from them.

    No rank counts twice. If a message overlaps with others, because its sender did not know that
    they had arrived another way, the larger one stays.

    Args:
        decode: Makes the parts of several steps of a payload.
        merge: Makes one part of several, in any order and grouping.
        patience_s: How long a step waits for a rank of which nothing comes.
        start_s: How long after the first message nothing is complete unless it holds all ranks of
            the world, because of others nothing may have come yet.
        forwards_late: Whether what comes after its step has ended is handed on by itself, because
            further on the step may not have ended yet. Otherwise it is left out.
        max_bytes: How many bytes may wait. If there are half as many, what is there of the next
            step is merged before the rest comes.
    """

    def __init__(
        self,
        *,
        world_size: int,
        decode: Callable[[bytes], Sequence[Any]],
        merge: Callable[[list[Any]], Any],
        patience_s: float,
        start_s: float,
        forwards_late: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._decode = decode
        self._merge = merge
        self._patience_s = patience_s
        self._start_s = start_s
        self._start_ends: float | None = None
        self._forwards_late = forwards_late
        self._max_bytes = max_bytes
        self._open: dict[tuple[int, str], _Open] = {}
        self._bytes = 0
        self._ended_place = -1
        self._ended_phases: set[str] = set()  # at that place
        self._stragglers: list[tuple[tuple[int, str], _Arrived]] = []
        self._last = np.full(world_size, -1, np.int64)
        self._heard = np.full(world_size, -np.inf)
        self._held = np.full(world_size, -1, np.int64)
        self._silent = np.zeros(world_size, np.bool_)
        self._told: dict[str, frozenset[int]] = {}

    # --- who is there ----------------------------------------------------------------------------

    @property
    def _joined(self) -> NDArray[np.bool_]:
        return self._heard >= 0

    @property
    def _left(self) -> NDArray[np.bool_]:
        left: NDArray[np.bool_] = self._last == END
        return left

    @property
    def members(self) -> frozenset[int]:
        """Ranks of which something has come, and that have not left and are not silent."""
        return _ranks(self._joined & ~self._left & ~self._silent)

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that have not left, and which a step had to do without."""
        return _ranks(~self._left & self._silent)

    def held(self, *, at_once: bool) -> int | None:
        """The last step that some rank is in; None while members have not answered.

        ``at_once``: as far as they have.
        """
        members = self._joined & ~self._left & ~self._silent
        return int(self._held.max()) if at_once or (self._held[members] >= 0).all() else None

    def tell_missing(self, step: Step) -> None:
        """Log once which ranks a step lacks and why, and once which return."""
        here, total = step.ranks, len(self._last)
        hold = f"the records hold {len(here)} of {total} ranks: %s"
        missed = self._told.get("missed", frozenset())
        absent, others = _ranks(~self._joined), self.members - here
        for which, kind, what in (
            (absent - here, "missed", f"{hold} made no HookLogger for this run so far"),
            (
                self.silent - here,
                "missed",
                f"{hold} sent nothing in time and may hang or have died",
            ),
            (missed & here, "back", "the records hold what %s measured"),
        ):
            if new := which - self._told.get(kind, frozenset()):
                self._told[kind] = self._told.get(kind, frozenset()) | new
                log.warning(f"telemetry: from step %d on, {what}", step.step, named(new))
        if others - self._told.get("others", frozenset()):
            self._told["others"] = self._told.get("others", frozenset()) | others
            log.warning(
                "telemetry: step %d was measured by %s, and not by %s; use the same every_n_steps "
                "on all ranks", step.step, named(here), named(others),
            )  # fmt: skip

    # --- what has arrived ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many steps are not complete."""
        return len(self._open)

    def add(self, message: Message, now: float) -> None:
        decoded = cache(partial(self._decode, message.payload))
        places = [place for place, _ in message.keys]
        self._note(message.ranks, max(places, default=-1), now)
        index = np.fromiter(message.ranks, np.int64, len(message.ranks))
        self._held[index] = np.maximum(self._held[index], message.held)
        for number, key in enumerate(message.keys if message.payload else ()):
            nbytes = len(message.payload) // len(message.keys)
            load = lambda number=number: decoded()[number]  # noqa: E731
            self._put(key, _Arrived(message.ranks, nbytes, load), now)

    def add_own(self, step: Step, now: float) -> None:
        """What this rank measured."""
        self._note(step.ranks, step.place, now)
        own = _Arrived(step.ranks, step.part.nbytes, lambda: step.part)
        self._put((step.place, step.phase), own, now)

    def _note(self, ranks: frozenset[int], place: int, now: float) -> None:
        index = np.fromiter(ranks, np.int64, len(ranks))
        self._heard[index] = now
        self._silent[index] = False
        self._last[index] = np.maximum(self._last[index], place)
        if self._start_ends is None:
            self._start_ends = now + self._start_s

    def take(self, now: float, *, hurry: bool = False) -> Step | None:
        """The next step that is complete by now or has waited long enough, merged.

        Args:
            now: Time of a clock that stands while this process is stopped, from 0.
            hurry: Wait for nobody.

        Returns:
            None if there is none. Call it until then; an exception of ``merge`` costs one step.
        """
        if self._stragglers:
            key, late = self._stragglers.pop(0)
            return Step(*key, late.ranks, late.load())
        if not self._open:
            return None
        key = min(self._open)
        step = self._open[key]
        if self._bytes > self._max_bytes / 2 and len(step.arrived) > 1:
            step.arrived = [self._whole(step.arrived)]
            self._bytes += step.arrived[0].nbytes
        awaited = self._awaited(*key, now)
        waited_s = now - np.maximum(self._heard[awaited], step.since)
        if (waited_s < self._patience_s).any() and self._bytes <= self._max_bytes and not hurry:
            return None
        self._silent |= awaited & self._joined
        place, phase = key
        if place > self._ended_place:
            self._ended_place, self._ended_phases = place, set()
        self._ended_phases.add(phase)
        whole = self._whole(self._open.pop(key).arrived)
        return Step(place, phase, whole.ranks, whole.load())

    def _awaited(self, place: int, phase: str, now: float) -> NDArray[np.bool_]:
        to_come = self._last < place
        if phase:  # who has sent another phase of the same step may still send this one
            to_come |= self._last == place
            for arrived in self._open[place, phase].arrived:
                to_come[np.fromiter(arrived.ranks, np.int64, len(arrived.ranks))] = False
        to_come &= ~self._silent
        begins = self._start_ends is not None and now < self._start_ends
        return to_come if begins else to_come & self._joined

    def _put(self, key: tuple[int, str], new: _Arrived, now: float) -> None:
        place, phase = key
        is_late = phase in self._ended_phases if place == self._ended_place else False
        if is_late or place < self._ended_place:
            if self._forwards_late:
                self._stragglers.append((key, new))
            return
        arrived = self._open.setdefault(key, _Open(since=now)).arrived
        overlapping = [other for other in arrived if other.ranks & new.ranks]
        if all(other.ranks <= new.ranks for other in overlapping):
            for other in overlapping:
                arrived.remove(other)
                self._bytes -= other.nbytes
            arrived.append(new)
            self._bytes += new.nbytes

    def _whole(self, arrived: list[_Arrived]) -> _Arrived:
        self._bytes -= sum(one.nbytes for one in arrived)
        ranks = frozenset().union(*(one.ranks for one in arrived))
        parts: list[Any] = []
        for one in arrived:
            parts.append(one.load())
            if len(parts) == DECODED_AT_ONCE:
                parts = [self._merge(parts)]
        whole = parts[0] if len(parts) == 1 else self._merge(parts)
        return _Arrived(ranks, whole.nbytes, lambda: whole)


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

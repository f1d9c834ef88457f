"""How what several ranks measured at one step is put together, however late it comes."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.measured import Measured, merge
from telemetry.ranks.messages import END, Message
from telemetry.shared.plain_text import ranks_in_words

log = logging.getLogger("telemetry")

MAX_BYTES = 256 * 2**20
DECODED_AT_ONCE = 8


class _Arrived(NamedTuple):
    """What some ranks measured at a step that waits for others."""

    ranks: frozenset[int]
    nbytes: int
    load: Callable[[], Measured]


class Gathering:
    """Knows which ranks a step still waits for, and merges what they sent, step after step.

    Each rank sends its steps in their order, so nobody waits for one that has sent a later step:
    ranks that log at different intervals do not hold each other up. A step is complete when no rank
    is left that may still send it. Otherwise it ends when nothing has come from those ranks for
    ``patience_s``, or when too many bytes wait; they are not waited for again until something comes
    from them. No rank counts twice: of messages that overlap, because one was repeated on another
    way, the larger stays.

    Args:
        start_s: How long after the first message nothing is complete unless it holds all ranks of
            the world, because of others nothing may have come yet.
        is_first: Whether what comes after its step has ended is left out. Otherwise it is handed on
            by itself, because further on the step may not have ended yet.
        max_bytes: How many bytes may wait. If there are half as many, what is there of the next
            step is merged before the rest comes.
    """

    def __init__(
        self,
        *,
        world_size: int,
        patience_s: float,
        start_s: float,
        is_first: bool,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._patience_s = patience_s
        self._start_s = start_s
        self._start_ends = np.inf
        self._is_first = is_first
        self._max_bytes = max_bytes
        self._open: dict[int, list[_Arrived]] = {}
        self._since: dict[int, float] = {}
        self._bytes = 0
        self._ended = -1
        self._last = np.full(world_size, -1, np.int64)
        self._heard = np.full(world_size, -np.inf)
        self._silent = np.zeros(world_size, np.bool_)
        self._told: defaultdict[str, frozenset[int]] = defaultdict(frozenset)

    # --- who is there ----------------------------------------------------------------------------

    @property
    def members(self) -> frozenset[int]:
        """Ranks of which something has come, and that have not left and are not silent."""
        return _ranks((self._heard >= 0) & (self._last < END) & ~self._silent)

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that have not left, and which a step had to do without."""
        return _ranks((self._last < END) & self._silent)

    def tell_missing(self, whole: Measured) -> None:
        """Log once which ranks a step lacks and why, and once which return."""
        here, hold = whole.ranks, f"from step {whole.step} on, the records hold"
        lack = f"{hold} {len(here)} of {len(self._last)} ranks: %s"
        for ranks, reason in (
            (_ranks(self._heard < 0), "made no HookLogger for this run so far"),
            (self.silent, "sent nothing in time: they ended with fewer batches, hang or died"),
        ):
            self._tell("missed", ranks - here, f"{lack} {reason}")
        self._tell("back", self._told["missed"] & here, f"{hold} what %s measured")
        self._tell(
            "elsewhere",
            self.members - here,
            f"step {whole.step} was measured by {ranks_in_words(here)}, and not by %s, which "
            "skipped it or had too much to send",
        )

    def _tell(self, kind: str, ranks: frozenset[int], message: str) -> None:
        if new := ranks - self._told[kind]:
            self._told[kind] |= new
            log.warning(f"telemetry: {message}", ranks_in_words(new))

    # --- what has arrived ------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many steps are not complete."""
        return len(self._open)

    def add(self, message: Message, now: float) -> None:
        self._note(message.ranks, max(message.places, default=-1), now)
        for n, place in enumerate(message.places if message.payload else ()):
            nbytes = len(message.payload) // len(message.places)
            self._put(place, _Arrived(message.ranks, nbytes, partial(message.part, n)), now)

    def add_own(self, part: Measured, now: float) -> None:
        """What this rank measured."""
        self._note(part.ranks, part.place, now)
        self._put(part.place, _Arrived(part.ranks, part.nbytes, lambda: part), now)

    def _note(self, ranks: frozenset[int], place: int, now: float) -> None:
        index = [*ranks]
        self._heard[index] = now
        self._silent[index] = False
        self._last[index] = np.maximum(self._last[index], place)
        self._start_ends = min(self._start_ends, now + self._start_s)

    def take(self, now: float, *, hurry: bool = False) -> Measured | None:
        """The next step that is complete by now or has waited long enough, merged.

        Args:
            now: Time of a clock that stands while this process is stopped, from 0.
            hurry: Wait for nobody.

        Returns:
            None if there is none. Call it until then; an exception of ``merge`` costs one step.
        """
        if not self._open:
            return None
        arrived = self._open[place := min(self._open)]
        if self._bytes > self._max_bytes / 2 and len(arrived) > 1:
            arrived.append(self._whole(arrived))
            self._bytes += arrived[0].nbytes
        awaited = (self._last < place) & ~self._silent
        if now >= self._start_ends:
            awaited &= self._heard >= 0
        waited_s = now - np.maximum(self._heard[awaited], self._since[place])
        if (waited_s < self._patience_s).any() and self._bytes <= self._max_bytes and not hurry:
            return None
        self._silent |= awaited & (self._heard >= 0)
        self._ended = max(self._ended, place)
        del self._open[place], self._since[place]
        return self._whole(arrived).load()

    def _put(self, place: int, new: _Arrived, now: float) -> None:
        if place <= self._ended and self._is_first:
            return
        arrived = self._open.setdefault(place, [])
        self._since.setdefault(place, now)
        overlapping = [other for other in arrived if other.ranks & new.ranks]
        if all(other.ranks <= new.ranks for other in overlapping):
            for other in overlapping:
                arrived.remove(other)
                self._bytes -= other.nbytes
            arrived.append(new)
            self._bytes += new.nbytes

    def _whole(self, arrived: list[_Arrived]) -> _Arrived:
        """What all of these are together, who are forgotten."""
        self._bytes -= sum(one.nbytes for one in arrived)
        ranks = frozenset().union(*(one.ranks for one in arrived))
        parts: list[Measured] = []
        while arrived:  # which lets go of each
            parts.append(arrived.pop().load())
            if len(parts) == DECODED_AT_ONCE or not arrived:
                parts = [merge(parts)]
        return _Arrived(ranks, parts[0].nbytes, lambda: parts[0])


def _ranks(which: NDArray[np.bool_]) -> frozenset[int]:
    return frozenset(np.flatnonzero(which).tolist())

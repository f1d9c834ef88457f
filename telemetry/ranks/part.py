"""What travels between ranks: what some of them measured at one step, and short notices."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from itertools import groupby

# Twice the steps that a run may have: see :class:`telemetry.ranks.channel.Places`.
LAP = 2**44


class Kind(IntEnum):
    RECORD = 0
    JOINED = 1
    LEFT = 2
    HELD = 3


@dataclass(frozen=True, kw_only=True)
class Part:
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
    def from_bytes(data: bytes) -> Part:
        """The inverse of :meth:`to_bytes`; ValueError: it is something else."""
        head, _, payload = data.partition(b"\n")
        kind, place, phase, ranks = json.loads(head)
        return Part(
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

"""Which part of a whole tensor one rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reduction = Literal["", "sum", "mean", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which part of a whole tensor one rank holds.

    A tensor exists in one or more copies, and each copy is split over one or more ranks. What the
    ranks of one copy measured adds up: shards of a parameter, parts of a batch. Of several copies
    the one with the lowest number counts, and all others are left out.

    Attributes:
        copy: Number of the copy, not negative.
        copies: How many there are; 0 if that is not known.
        counts: Whether no rank that this one knows of has a lower copy; else it need not measure.
        piece: If units or channels are split over ranks, which of the pieces this is, from 0.
        pieces: How many there are; 1 if each rank has all units.
        shard: Which part of its copy this is, for telling whether two copies are equal; -1 if
            nothing says that other ranks' are copies of it.
        reduction: How the values of the ranks of one copy become the tensor's, if what they hold is
            not part of it: a ``Partial`` of ``DTensor``.
        reduced: Over how many ranks that goes.
    """

    copy: int = 0
    copies: int = 1
    counts: bool = True
    piece: int = 0
    pieces: int = 1
    shard: int = 0
    reduction: Reduction = ""
    reduced: int = 1


# All of it, or a part that adds up with those of all other ranks.
WHOLE = Share()

"""What several ranks measured of many tensors, as columns of numbers that merge at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.merging import NO_ROWS, Table, by_key, merge_tables, minima, spreads
from telemetry.ranks.share import Share
from telemetry.records.moments import rms_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors

# Extremes of more units are rounded to three bits of mantissa, at most 6 % off; zero, the sign and
# what is not finite stay.
EXACT_UNITS = 256

_ROUND, _MASK = np.uint32(1 << 19), np.uint32(0xFFF00000)

Units = NDArray[np.float32]


class Row(NamedTuple):
    """Which tensor: the pipeline stage, the kind as in :class:`StepRecord`, and its name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


class Piece(NamedTuple):
    """Which of the units of a tensor: see :class:`Share`. Only pieces of one size merge."""

    row: Row
    copy: int
    piece: int
    pieces: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """What was measured of many tensors.

    Attributes:
        table: Of each tensor how many ``calls`` a rank saw, and of the ranks' root mean squares
            the lowest and the highest.
        rows: The rest, without units.
        units: The smallest value of each unit, and the negative of the largest, float32
            ``[2, size]``.
    """

    table: Table
    rows: Rows
    units: Mapping[Piece, Units]

    def __post_init__(self) -> None:
        rows, sizes = self.rows, {len(self.rows.buckets), len(self.rows.counts)}
        if sizes != {rows.bucket_count.sum()} or len(rows) != len(self.table.rows):
            raise ValueError("its columns do not fit together")

    @staticmethod
    def of(rank: int, shares: Mapping[Row, Share], rows: Rows) -> TensorTable:
        """Those of one rank: which tensors ``rows`` are of, and its shares of them."""
        if not shares:
            return EMPTY
        units = {}
        for place, (row, share) in enumerate(shares.items()):
            extremes = rows.units_of(place)
            if extremes is not None:
                piece = Piece(row, share.copy, share.piece, share.pieces, len(extremes))
                low, high = _rounded(extremes).T
                units[piece] = np.stack([low, -high])
        return TensorTable(
            table=Table.of(
                tuple(shares),
                np.array([share.copy for share in shares.values()], np.int64),
                calls=rows.calls,
                **spreads(rank, rms_of(rows)),
            ),
            rows=replace(rows.without_units(), counts=_shortened(rows.counts)),
            units=units,
        )

    @staticmethod
    def merge_all(tensors: Sequence[TensorTable]) -> TensorTable:
        """As if one rank had held what all of them did; the order does not matter."""
        some = [one for one in tensors if one.table.rows]
        if len(some) < 2:
            return some[0] if some else EMPTY
        table, kept = merge_tables([one.table for one in some])
        rows = Rows.concatenate([one.rows for one in some])
        return TensorTable(
            table=table,
            rows=rows.merged(np.concatenate(kept), len(table.rows)),
            units=by_key(minima)(one.units for one in some),
        )

    def records(self) -> Tensors[Row]:
        """What was measured of each tensor as a whole."""
        none = np.empty((2, 0), np.float32)
        names: tuple[Any, ...] = tuple(self.table.rows)
        known = self._whole_units()
        units = [known.get(row, none) for row in names]
        low, high = np.concatenate([*units, none], axis=1)
        rows = self.rows.having(
            np.stack([low, -high], axis=1),
            unit_count=[one.shape[1] for one in units],
            calls=self.table["calls"],
        )
        return Tensors(names, rows)

    def _whole_units(self) -> dict[Row, Units]:
        """Those of the rows all of whose pieces are there, of the lowest copy."""
        by_row: dict[Row, list[Piece]] = {}
        for piece in sorted(self.units):
            pieces = by_row.setdefault(piece.row, [piece])
            if piece.copy == pieces[0].copy and piece is not pieces[0]:
                pieces.append(piece)
        return {
            row: np.concatenate([self.units[piece] for piece in pieces], axis=1)
            for row, pieces in by_row.items()
            if [piece.piece for piece in pieces] == list(range(pieces[0].pieces))
        }


# That of a step that was not measured in full.
EMPTY = TensorTable(table=NO_ROWS, rows=Rows.of(()), units={})


def _shortened(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scaled-up counts in single precision, far finer than a sample: they travel in half the room.

    Counts of all elements are whole numbers, and stay as they are.
    """
    return np.where(counts == np.floor(counts), counts, counts.astype(np.float32))


def _rounded(extremes: Units) -> Units:
    if len(extremes) <= EXACT_UNITS:
        return extremes
    bits = (extremes.view(np.uint32) + _ROUND) & _MASK
    tiny = (bits == 0) | (bits == 0x80000000)
    # What is not zero must not become zero, nor what is finite infinite.
    keep = ~np.isfinite(extremes) | ~np.isfinite(bits.view(np.float32)) | (tiny & (extremes != 0))
    rounded: Units = np.where(keep, extremes, bits.view(np.float32))
    return rounded

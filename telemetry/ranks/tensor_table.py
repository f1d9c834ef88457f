"""What several ranks measured of many tensors, as columns of numbers that merge at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.merging import NO_ROWS, Table, by_key, group, merge_tables, minima, spreads
from telemetry.ranks.share import Share
from telemetry.records import TensorRecord
from telemetry.records.buckets import LAST_BUCKET
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records.sketch import Sketch

_FIGURES = (*COUNTS, *POWER_SUMS, *EXTREMES)

# More than there are buckets; a bucket of a row is one number in the order of both.
_CODES = 4096

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
        table: Of each tensor the fields of :class:`Moments`, how many ``calls`` a rank saw, and of
            the ranks' root mean squares the lowest and the highest.
        bucket_sizes: How many buckets each row has, int64 ``[rows]``.
        buckets: As in :class:`Sketch`, row after row, int16.
        counts: As in :class:`Sketch`, row after row, float64.
        units: The smallest value of each unit, and the negative of the largest, float32
            ``[2, size]``.
    """

    table: Table
    bucket_sizes: NDArray[np.int64]
    buckets: NDArray[np.int16]
    counts: NDArray[np.float64]
    units: Mapping[Piece, Units]

    def __post_init__(self) -> None:
        if int(self.bucket_sizes.sum()) != self.buckets.size:
            raise ValueError("its columns do not fit together")

    @staticmethod
    def of(rank: int, tensors: Mapping[Row, tuple[Share, TensorRecord]]) -> TensorTable:
        if not tensors:
            return EMPTY
        sketches = [record.sketch for _, record in tensors.values()]
        return TensorTable(
            table=Table.of(
                tuple(tensors),
                np.array([share.copy for share, _ in tensors.values()], np.int64),
                calls=np.array([record.calls for _, record in tensors.values()], np.int64),
                **{
                    name: np.array([getattr(s, name) for s in sketches], float) for name in _FIGURES
                },
                **spreads(rank, np.array([s.rms for s in sketches])),
            ),
            bucket_sizes=np.array([s.buckets.size for s in sketches], np.int64),
            buckets=np.concatenate([s.buckets for s in sketches]),
            counts=_shortened(np.concatenate([s.counts for s in sketches])),
            units={
                Piece(row, share.copy, share.piece, share.pieces, r.unit_min.size): np.stack(
                    [_rounded(r.unit_min), -_rounded(r.unit_max)]
                )
                for row, (share, r) in tensors.items()
                if r.unit_min is not None and r.unit_max is not None
            },
        )

    @staticmethod
    def merge_all(tensors: Sequence[TensorTable]) -> TensorTable:
        """As if one rank had held what all of them did; the order does not matter."""
        some = [one for one in tensors if one.table.rows]
        if len(some) < 2:
            return some[0] if some else EMPTY
        table, kept = merge_tables([one.table for one in some])
        parts = list(zip(some, kept, strict=True))
        rows = np.concatenate([np.repeat(at, one.bucket_sizes) for one, at in parts])
        codes = rows * _CODES + np.concatenate([one.buckets for one in some]) + LAST_BUCKET
        codes, counts = codes[rows >= 0], np.concatenate([one.counts for one in some])[rows >= 0]
        order, starts = group(codes[:, None])
        row, bucket = np.divmod(codes[order[starts]], _CODES)
        return TensorTable(
            table=table,
            bucket_sizes=np.bincount(row, minlength=len(table.rows)),
            buckets=(bucket - LAST_BUCKET).astype(np.int16),
            counts=np.add.reduceat(counts[order], starts),
            units=by_key(minima)(one.units for one in some),
        )

    def records(self) -> dict[Row, TensorRecord]:
        """What was measured of each tensor as a whole."""
        ends = np.cumsum(self.bucket_sizes)
        starts = ends - self.bucket_sizes
        figures = {name: self.table[name].tolist() for name in _FIGURES}
        units, calls = self._whole_units(), self.table["calls"].tolist()
        records = {}
        for index, row in enumerate(self.table.rows):
            some = slice(starts[index], ends[index])
            moments: dict[str, Any] = {name: column[index] for name, column in figures.items()}
            moments |= {name: int(moments[name]) for name in COUNTS}
            low, high = units.get(row, (None, None))
            records[row] = TensorRecord(
                sketch=Sketch(**moments, buckets=self.buckets[some], counts=self.counts[some]),
                calls=calls[index],
                unit_min=low,
                unit_max=None if high is None else -high,
            )
        return records

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
EMPTY = TensorTable(
    table=NO_ROWS,
    bucket_sizes=np.empty(0, np.int64),
    buckets=np.empty(0, np.int16),
    counts=np.empty(0),
    units={},
)


def _shortened(counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scaled-up counts in single precision, far finer than a sample: they travel in half the room.

    Counts of all elements are whole numbers, and stay as they are.
    """
    return np.where(counts == np.floor(counts), counts, counts.astype(np.float32))


def _rounded(extremes: Units) -> Units:
    if extremes.size <= EXACT_UNITS:
        return extremes
    bits = (extremes.view(np.uint32) + _ROUND) & _MASK
    tiny = (bits == 0) | (bits == 0x80000000)
    # What is not zero must not become zero, nor what is finite infinite.
    keep = ~np.isfinite(extremes) | ~np.isfinite(bits.view(np.float32)) | (tiny & (extremes != 0))
    rounded: Units = np.where(keep, extremes, bits.view(np.float32))
    return rounded

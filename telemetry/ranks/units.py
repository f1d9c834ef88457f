"""Extremes of units and channels, which may be split over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.share import Share

Extremes = NDArray[np.float32]

EXACT_UNITS = 256
"""Extremes of more units are rounded to three bits of mantissa, at most 6 % off; zero, the sign and
what is not finite stay."""

_ROUND, _MASK = np.uint32(1 << 19), np.uint32(0xFFF00000)


class _Piece(NamedTuple):
    row: int
    piece: int
    pieces: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Units:
    """Smallest and largest value of the units of many tensors, piece after piece.

    Attributes:
        pieces: Row, number of the piece, number of pieces and number of units, int64 ``[k, 4]``.
        low: Smallest values, float32, piece after piece.
        high: Largest values, float32, piece after piece.
    """

    pieces: NDArray[np.int64]
    low: Extremes
    high: Extremes

    @staticmethod
    def of(rows: Sequence[tuple[Share, Extremes | None, Extremes | None]]) -> Units:
        """Those of one rank, for each row its share and extremes, None without units."""
        found: dict[_Piece, tuple[Extremes, Extremes]] = {}
        for row, (share, low, high) in enumerate(rows):
            if low is not None and high is not None:
                piece = _Piece(row, share.piece, share.pieces, low.size)
                found[piece] = _rounded(low), _rounded(high)
        return Units._from(found)

    @staticmethod
    def merge_all(parts: Sequence[Units], places: Sequence[NDArray[np.int64]]) -> Units:
        """Those over all ranks; each part's rows go to ``places``, and -1 leaves a row out.

        NaN where one is NaN. Rows of which ranks have different numbers of units have none.
        """
        found: dict[_Piece, tuple[Extremes, Extremes]] = {}
        for part, at in zip(parts, places, strict=True):
            for piece, (low, high) in part._by_piece().items():
                placed = piece._replace(row=int(at[piece.row]))
                if placed.row >= 0:
                    known = found.get(placed, (low, high))
                    found[placed] = np.minimum(known[0], low), np.maximum(known[1], high)
        return Units._from(found)

    def whole(self) -> dict[int, tuple[Extremes, Extremes]]:
        """Smallest and largest values of the units of each row all of whose pieces are there."""
        by_row: dict[int, list[_Piece]] = {}
        found = self._by_piece()
        for piece in sorted(found):
            by_row.setdefault(piece.row, []).append(piece)
        return {
            row: (
                np.concatenate([found[piece][0] for piece in pieces]),
                np.concatenate([found[piece][1] for piece in pieces]),
            )
            for row, pieces in by_row.items()
            if [p.piece for p in pieces] == list(range(pieces[0].pieces))
        }

    def _by_piece(self) -> dict[_Piece, tuple[Extremes, Extremes]]:
        ends = np.cumsum(self.pieces[:, 3])
        return {
            _Piece(*piece): (self.low[end - piece[3] : end], self.high[end - piece[3] : end])
            for piece, end in zip(self.pieces.tolist(), ends.tolist(), strict=True)
        }

    @staticmethod
    def _from(found: dict[_Piece, tuple[Extremes, Extremes]]) -> Units:
        nothing = np.empty(0, np.float32)
        return Units(
            pieces=np.array(list(found), np.int64).reshape(-1, 4),
            low=np.concatenate([nothing, *(low for low, _ in found.values())]),
            high=np.concatenate([nothing, *(high for _, high in found.values())]),
        )


def _rounded(extremes: Extremes) -> Extremes:
    if extremes.size <= EXACT_UNITS:
        return extremes
    bits = (extremes.view(np.uint32) + _ROUND) & _MASK
    tiny = (bits == 0) | (bits == 0x80000000)
    # What is not zero must not become zero, nor what is finite infinite.
    keep = ~np.isfinite(extremes) | ~np.isfinite(bits.view(np.float32)) | (tiny & (extremes != 0))
    rounded: Extremes = np.where(keep, extremes, bits.view(np.float32))
    return rounded

"""Arrangement of feature maps and filters in one picture, for who draws it and who reads it."""

from __future__ import annotations

import math

MAX_CHANNELS = 64
"""Maps of one picture; of more, the first are drawn."""


def columns_of(count: int, height: int, width: int) -> int:
    """Return how many of ``count`` maps of this size stand in a row: the whole is nearly square."""
    return min(max(1, round(math.sqrt(count * height / width))), count)


def columns_in(count: int, height: int, width: int) -> int | None:
    """Return how many of ``count`` maps stand in a row of a picture; None if it is no grid of them.

    Around each map there is a gap of one pixel.
    """
    for columns in range(1, count + 1):
        rows = -(-count // columns)
        sizes = [divmod(height - 1, rows), divmod(width - 1, columns)]
        if any(rest or size < 2 for size, rest in sizes):
            continue
        if columns_of(count, sizes[0][0] - 1, sizes[1][0] - 1) == columns:
            return columns
    return None

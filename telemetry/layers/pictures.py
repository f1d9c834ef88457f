"""Arrangement of feature maps and filters in one picture, for who draws it and who reads it."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

MAX_CHANNELS = 64
"""Maps of one picture; of more, the first are drawn."""
GAP_LEVEL = 48
"""Gray of the gap of one pixel around each map, distinct from black."""


def columns_of(count: int, height: int, width: int) -> int:
    """Return how many of ``count`` maps of this size stand in a row: the whole is nearly square."""
    return min(max(1, round(math.sqrt(count * height / width))), count)


def columns_in(count: int, gray: NDArray[np.uint8]) -> int | None:
    """Return how many of ``count`` maps stand in a row of a picture; None without a grid."""
    height, width = gray.shape
    for columns in range(1, count + 1):
        rows = -(-count // columns)
        tall, wide = (height - 1) // rows, (width - 1) // columns  # of a map with one gap
        fits = min(tall, wide) > 1 and (tall * rows, wide * columns) == (height - 1, width - 1)
        if not fits or columns_of(count, tall - 1, wide - 1) != columns:
            continue
        if (gray[::tall] == GAP_LEVEL).all() and (gray[:, ::wide] == GAP_LEVEL).all():
            return columns
    return None

"""A curve as a line of block characters, for terminals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float] | NDArray[np.float64], *, width: int, log: bool) -> str:
    """At most ``width`` characters, each for the largest of the values that it stands for.

    There must be one at least. ``!`` stands for a value that is not finite. With ``log``, heights
    show magnitudes, no value may be negative, and a zero is blank.
    """
    array = np.asarray(values, dtype=np.float64)
    pieces = np.array_split(array, min(width, array.size))
    largest = np.array([piece.max() for piece in pieces])
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.log10(largest) if log else largest
    drawable = heights[np.isfinite(heights)] / 2  # halved: the span of the largest is finite, too
    low, span = (drawable.min(), np.ptp(drawable)) if drawable.size else (0.0, 0.0)
    return "".join(
        " " if log and value == 0 else _block(height, float(low), float(span))
        for value, height in zip(largest, heights, strict=True)
    )


def _block(height: float, low: float, span: float) -> str:
    if not np.isfinite(height):
        return "!"
    return _BLOCKS[int((height / 2 - low) / span * (len(_BLOCKS) - 1) + 0.5) if span else 0]

"""A matrix of norms as a small picture."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_CELL = 4  # pixels, each way
_MAX_SIDE = 1024  # pixels
_NONFINITE = (255, 0, 255)
_MISSING = (48, 48, 48)
# Dark blue over green to yellow: as light as the value is large, for every kind of eye.
_STOPS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]])


def heat_map(values: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Logarithms as colors, from the 2nd to the 98th percentile of all.

    Args:
        values: ``[rows, columns]``, not negative; NaN: missing, inf: not finite.

    Returns:
        ``[height, width, 3]``; a cell is up to 4 pixels wide and high.
    """
    usable = np.isfinite(values) & (values > 0)
    logs = np.log10(np.where(usable, values, 1.0))
    low, high = np.percentile(logs[usable], [2, 98]) if usable.any() else (0.0, 1.0)
    shares = np.clip((logs - low) / max(high - low, 1e-9), 0, 1)
    shares[values == 0] = 0
    pixels = np.empty((*values.shape, 3), np.uint8)
    for channel, stops in enumerate(_STOPS.T):
        pixels[..., channel] = np.interp(shares, np.linspace(0, 1, len(stops)), stops)
    pixels[np.isnan(values)] = _MISSING
    pixels[np.isinf(values)] = _NONFINITE
    rows, columns = (min(_CELL, max(1, _MAX_SIDE // side)) for side in values.shape)
    return pixels.repeat(rows, axis=0).repeat(columns, axis=1)


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG file of ``[height, width, 3]``, by the standard library alone.

    Format: https://www.w3.org/TR/png-3/, 8-bit RGB, no filter, one ``IDAT`` chunk.
    """
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each begins with its filter, 0: none
    lines[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in (
            (b"IHDR", header),
            (b"IDAT", zlib.compress(lines.tobytes())),
            (b"IEND", b""),
        )
    )

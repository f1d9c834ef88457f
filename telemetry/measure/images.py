"""Turns feature maps, filters and inputs into pixels.

``sample_*`` runs on the training thread and copies the few numbers that a picture needs, on the
tensor's device. ``*_grid`` and ``encode_png`` run on the background thread, on the host. Pixels are
gray, or RGB for three channels; values that are not finite are magenta.
"""

from __future__ import annotations

import io
import math
import zlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.layers.pictures import GAP_LEVEL, MAX_CHANNELS, columns_of

MAX_IMAGES = 16
_MAX_SIDE = 128  # pixels of one map, per side
_VISIBLE_SIDE = 32  # smaller maps are enlarged until their longer side has at least these pixels
_STRIP_HEIGHT = 4  # pixels of a map with a single row
_SHARES = (0.0, 0.01, 0.99, 1.0)  # of the values of a map, below: the least, black, white, most
_NONFINITE_RGB = (255, 0, 255)


def sample_feature_maps(output: Tensor) -> Tensor | None:
    """Copy the first sample's maps: up to 64 channels, at most 128 pixels per side.

    Args:
        output: A convolution's output: ``[N, C, H, W]``, ``[N, C, L]``, or ``[N, C, D, H, W]``, of
            which the middle slice is taken. Real or complex (magnitudes are shown).

    Returns:
        A float32 copy on the same device, ``[channels, height, width]``, with ``height`` 1 for
        ``[N, C, L]``; None if the tensor is empty or has another shape.
    """
    planes = _planes(output)
    return None if planes is None else _copy(planes[0, :MAX_CHANNELS])


def sample_inputs(batch: Tensor) -> Tensor | None:
    """Copy the first 16 images of ``[N, 1 or 3, H, W]``, like :func:`sample_feature_maps`."""
    if batch.ndim != 4 or batch.shape[1] not in (1, 3):
        return None
    planes = _planes(batch)
    return None if planes is None else _copy(planes[:MAX_IMAGES])


def sample_filters(weight: Tensor) -> Tensor | None:
    """Copy the first 64 filters of a convolution.

    Args:
        weight: ``[filters, channels, ...]`` with one to three spatial axes.

    Returns:
        A float32 copy on the same device, ``[filters, 1 or 3, height, width]``: the mean over the
        input channels unless there are three; None as in :func:`sample_feature_maps`.
    """
    planes = _planes(weight)
    if planes is None:
        return None
    filters = _copy(planes[:MAX_CHANNELS])
    return filters if filters.shape[1] == 3 else filters.mean(dim=1, keepdim=True)


def feature_map_grid(maps: Tensor) -> NDArray[np.uint8]:
    """Draw each map with its own contrast: its 1st percentile is black, its 99th white.

    A constant map, such as a dead channel, is black.

    Args:
        maps: ``[channels, height, width]``, float32, on the CPU.

    Returns:
        ``[height, width, 3]``.
    """
    low, high = _limits(maps.flatten(1).numpy())
    return _grid(maps[:, None].numpy(), low[:, :, None, None], high[:, :, None, None])


def filter_grid(filters: Tensor) -> NDArray[np.uint8]:
    """Draw all filters in the same scale with zero in the middle, so that dead ones look flat.

    Args:
        filters: ``[filters, 1 or 3, height, width]``, float32, on the CPU.
    """
    _, high = _limits(filters.abs().reshape(1, -1).numpy())
    return _grid(filters.numpy(), -high, high)


def input_grid(images: Tensor) -> NDArray[np.uint8]:
    """Draw all images in the same scale, so that one with another range stands out.

    Args:
        images: ``[N, 1 or 3, height, width]``, float32, on the CPU.
    """
    return _grid(images.numpy(), *_limits(images.reshape(1, -1).numpy()))


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """Encode ``[height, width, 3]`` pixels as PNG, in gray levels if all pixels are gray."""
    from PIL import Image

    gray = image[:, :, 0]
    if not image.strides[2] or all(np.array_equal(image[:, :, i], gray) for i in (1, 2)):
        image = gray
    file = io.BytesIO()
    # Chosen on pictures of all kinds: larger levels and other types take longer or more bytes.
    Image.fromarray(image).save(file, "PNG", compress_level=1, compress_type=zlib.Z_RLE)
    return file.getvalue()


def _planes(x: Tensor) -> Tensor | None:
    """Return a view ``[N, C, height, width]`` of at most 128 pixels per side."""
    if x.is_nested or x.is_meta or x.layout != torch.strided:
        return None
    if not 3 <= x.ndim <= 5 or x.numel() == 0:
        return None
    if x.ndim == 5:
        x = x[:, :, x.shape[2] // 2]
    elif x.ndim == 3:
        x = x[:, :, None]
    height, width = (math.ceil(side / _MAX_SIDE) for side in x.shape[2:])
    return x[:, :, ::height, ::width]


def _copy(x: Tensor) -> Tensor:
    x = x.detach()
    real = x.abs() if x.is_complex() else x
    return real.to(torch.float32, copy=True, memory_format=torch.contiguous_format)


def _limits(rows: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return black and white of each row: percentiles of its finite values, or their range.

    Shapes ``[rows, 1]``.
    """
    finite = np.isfinite(rows)
    known = finite.any(axis=1, keepdims=True)  # of a row that is not, no pixel has a level
    values = np.where(finite | ~known, np.where(known, rows, 0), np.nan).astype(np.float64)
    quantile = np.quantile if finite.all() else np.nanquantile
    lowest, low, high, highest = quantile(values, _SHARES, axis=1, keepdims=True)
    # More than 99 % of a sparse map are zeros; the rest is worth seeing.
    flat = ~(low < high)
    return np.where(flat, lowest, low), np.where(flat, highest, high)


def _grid(
    images: NDArray[np.float32], low: NDArray[np.float64], high: NDArray[np.float64]
) -> NDArray[np.uint8]:
    """Draw images ``[N, 1 or 3, H, W]`` side by side; ``low`` and ``high`` broadcast to them.

    The three colors of a gray picture share memory; it is read-only.
    """
    finite = np.isfinite(images)
    width = np.where(high > low, high - low, 1.0)  # where all values agree they are black
    with np.errstate(over="ignore", invalid="ignore"):
        levels = (images - low) / width
        pixels = np.rint(np.clip(levels, 0, 1) * 255).astype(np.uint8)
    if not finite.all():
        color = np.array(_NONFINITE_RGB, np.uint8)[:, None, None]
        pixels = np.where(finite.all(axis=1, keepdims=True), pixels, color)
    grid = _side_by_side(_enlarged(pixels.transpose(0, 2, 3, 1)))
    return np.broadcast_to(grid, (*grid.shape[:2], 3))


def _enlarged(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Repeat the pixels of small images ``[N, height, width, colors]``."""
    height, width = pixels.shape[1:3]
    factor = math.ceil(_VISIBLE_SIDE / max(height, width))
    return pixels.repeat(_STRIP_HEIGHT if height == 1 else factor, axis=1).repeat(factor, axis=2)


def _side_by_side(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Arrange images ``[N, height, width, colors]`` in a grid with gaps of one pixel."""
    count, height, width, colors = pixels.shape
    if count == 1:
        return pixels.reshape(height, width, colors)
    columns = columns_of(count, height, width)
    rows = -(-count // columns)
    tiles = np.full((rows * columns, height + 1, width + 1, colors), GAP_LEVEL, np.uint8)
    tiles[:count, 1:, 1:] = pixels
    tiles = tiles.reshape(rows, columns, height + 1, width + 1, colors).swapaxes(1, 2)
    joined = tiles.reshape(rows * (height + 1), columns * (width + 1), colors)
    grid: NDArray[np.uint8] = np.pad(joined, ((0, 1), (0, 1), (0, 0)), constant_values=GAP_LEVEL)
    return grid

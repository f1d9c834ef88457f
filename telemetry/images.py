"""Turns feature maps, filters and inputs into pixels.

``sample_*`` runs on the training thread and copies the few numbers that a picture needs, on the
tensor's device. ``*_grid`` and ``encode_png`` run on the background thread, on the host. Pixels are
gray, or RGB for three channels; values that are not finite are magenta.
"""

from __future__ import annotations

import io
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_CHANNELS = 64
MAX_IMAGES = 16
_MAX_SIDE = 128  # pixels of one map, per side
_VISIBLE_SIDE = 32  # smaller maps are enlarged until their longer side has at least these pixels
_STRIP_HEIGHT = 4  # pixels of a map with a single row
_PERCENTILES = (1.0, 99.0)
_NONFINITE_RGB = (255, 0, 255)
_GAP_LEVEL = 48  # gray between the maps, distinct from black


def sample_feature_maps(output: Tensor) -> Tensor | None:
    """The first sample's maps: up to 64 channels, subsampled to at most 128 pixels per side.

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
    """The first 16 images of ``[N, 1 or 3, H, W]``, as :func:`sample_feature_maps` copies them."""
    if batch.ndim != 4 or batch.shape[1] not in (1, 3):
        return None
    planes = _planes(batch)
    return None if planes is None else _copy(planes[:MAX_IMAGES])


def sample_filters(weight: Tensor) -> Tensor | None:
    """The first 64 filters of a convolution.

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
    """Each map with its own contrast: its 1st percentile is black, its 99th white.

    A constant map, such as a dead channel, is black.

    Args:
        maps: ``[channels, height, width]``, float32, on the CPU.

    Returns:
        ``[height, width, 3]``.
    """
    low, high = _limits(maps.flatten(1))
    return _grid(maps[:, None], low[:, None, None, None], high[:, None, None, None])


def filter_grid(filters: Tensor) -> NDArray[np.uint8]:
    """All filters in the same scale with zero in the middle, so that dead ones look flat.

    Args:
        filters: ``[filters, 1 or 3, height, width]``, float32, on the CPU.
    """
    _, high = _limits(filters.abs().reshape(1, -1))
    return _grid(filters, -high, high)


def input_grid(images: Tensor) -> NDArray[np.uint8]:
    """All images in the same scale, so that one with another range stands out.

    Args:
        images: ``[N, 1 or 3, height, width]``, float32, on the CPU.
    """
    return _grid(images, *_limits(images.reshape(1, -1)))


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """A PNG file of ``[height, width, 3]`` pixels, in gray levels if all pixels are gray."""
    from PIL import Image

    gray = image[:, :, 0]
    if np.array_equal(image[:, :, 1], gray) and np.array_equal(image[:, :, 2], gray):
        image = gray
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG", compress_level=1)  # higher: slower, hardly smaller
    return file.getvalue()


def _planes(x: Tensor) -> Tensor | None:
    """A view ``[N, C, height, width]`` of at most 128 pixels per side."""
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


def _limits(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Black and white of each row: percentiles of its finite values, or their range if those agree.

    A row without a finite value has the limits ``inf`` and ``-inf``.
    """
    finite = rows.where(rows.isfinite(), torch.nan)
    quantiles = torch.tensor(_PERCENTILES) / 100
    low, high = finite.nanquantile(quantiles, dim=1)
    # More than 99 % of a sparse map are zeros; the rest is worth seeing.
    flat = ~(low < high)
    lowest = finite.nan_to_num(torch.inf).amin(dim=1)
    highest = finite.nan_to_num(-torch.inf).amax(dim=1)
    return torch.where(flat, lowest, low), torch.where(flat, highest, high)


def _grid(images: Tensor, low: Tensor, high: Tensor) -> NDArray[np.uint8]:
    """Images ``[N, 1 or 3, H, W]`` side by side; ``low`` and ``high`` broadcast to them."""
    from torchvision.utils import make_grid

    low, high = low.double(), high.double()  # their difference may be too large for float32
    levels = ((images - low) / (high - low)).nan_to_num(0.0)  # 0 / 0 where all values agree
    levels = levels.clamp(0, 1).mul(255).round().to(torch.uint8)
    nonfinite = ~images.isfinite().all(dim=1, keepdim=True)
    color = torch.tensor(_NONFINITE_RGB, dtype=torch.uint8)[:, None, None]
    pixels = torch.where(nonfinite, color, levels)

    height, width = pixels.shape[2:]
    factor = math.ceil(_VISIBLE_SIDE / max(height, width))
    pixels = pixels.repeat_interleave(_STRIP_HEIGHT if height == 1 else factor, dim=2)
    pixels = pixels.repeat_interleave(factor, dim=3)
    count, _, height, width = pixels.shape
    columns = max(1, round(math.sqrt(count * height / width)))
    grid = make_grid(pixels, nrow=columns, padding=1, pad_value=_GAP_LEVEL)
    image: NDArray[np.uint8] = grid.permute(1, 2, 0).contiguous().numpy()
    return image

"""Tensors of every dtype and layout that are measured, and their statistics by NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry import TensorRecord
from telemetry.records.sketch import sketch_array
from tests.helpers.moments_close import assert_moments_close

COUNT = 61_440

# Of an accelerator's tensor, and of the same one in CPU memory, the view that is measured and its
# axis of units.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int | None]] = {
    "flat": (lambda x: x, None),
    "no element": (lambda x: x[:0], None),
    "one element": (lambda x: x[9:10], None),
    "a number": (lambda x: x[9], None),
    "not aligned": (lambda x: x[1:-1], None),
    "every third": (lambda x: x[::3], None),
    "few units last": (lambda x: x[:60_004].view(-1, 7)[1:], 1),
    "64 units last": (lambda x: x.view(-1, 64), 1),
    "768 units last": (lambda x: x.view(-1, 8, 768), -1),
    "15,360 units last": (lambda x: x.view(-1, 15_360), 1),
    "units last, not aligned": (lambda x: x[3 : 3 + 600 * 100].view(600, 100), 1),
    "units first": (lambda x: x.view(60, -1), 0),
    "units in the middle": (lambda x: x.view(8, 16, 480), 1),
    "7 × 7 in the middle": (lambda x: x[: 19 * 64 * 49].view(19, 64, 7, 7), 1),
    "channels_last": (lambda x: x.view(8, 16, 40, 12).permute(0, 3, 1, 2), 1),
    "transposed": (lambda x: x.view(240, 256).t(), 1),
    "columns": (lambda x: x.view(240, 256)[:, 3:200], 1),
    "expanded": (lambda x: x[:256].expand(3, 256), 1),
    "negative bit": (lambda x: torch._neg_view(x).view(240, 256), 1),
}

SPECIAL = [nan, float("inf"), -float("inf"), 3.4e38, -1e30, 65504.0, 1e-25, 1e-45, 0.0, -0.0]

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "small": lambda x: x * 1e-8,
    "mixed scales": lambda x: x * (torch.arange(COUNT) % 24 * -1.0).exp2(),
    "large": lambda x: x * 1e15,
    "half zeros": lambda x: x.relu(),
    "zeros": torch.zeros_like,
    "zeros of both signs": lambda x: x * 0.0,
    "special ones among others": lambda x: x.index_copy(
        0, torch.arange(len(SPECIAL) * 99)[::97][: len(SPECIAL)], torch.tensor(SPECIAL)
    ),
    "special ones": lambda x: torch.tensor(SPECIAL * (COUNT // len(SPECIAL))),
    "all NaN": lambda x: x * nan,
    "any bits": lambda x: torch.from_numpy(
        np.random.default_rng(0).integers(0, 1 << 32, COUNT, dtype=np.uint32).view(np.float32)
    ),
}


def made(dtype: torch.dtype, values: str) -> Tensor:
    """Numbers in CPU memory, always the same, ``[COUNT]``."""
    normal = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    x = VALUES[values](normal)
    if dtype.is_complex:
        return torch.complex(x.double(), x.double().flip(0)).to(dtype)
    if dtype.is_floating_point:
        return x.to(dtype)
    return (x.nan_to_num(0, 0, 0).clamp(-9, 9) * 10).abs().to(dtype)


def to_float64(tensor: Tensor) -> NDArray[Any]:
    """Return the values of any dense tensor; magnitudes of complex numbers."""
    tensor = tensor.detach().cpu().clone()  # also of zeros that have no memory
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs().numpy()
    if tensor.is_floating_point() and tensor.element_size() < 8:
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.float64).resolve_neg().numpy()


def assert_measured(
    record: TensorRecord,
    tensor: Tensor,
    axis: int | None = None,
    *,
    powers: int = 4,
    rtol: float = 1e-6,
    sampled: bool = False,
) -> None:
    """Compare a measured tensor with NumPy's float64 values.

    Sums may differ by ``rtol``: a device may add up a few neighbours in float32. Of two powers,
    the sums of others are not compared, and no histogram of a sample.
    """
    values = to_float64(tensor)
    unknown = {} if powers == 4 else {"sum_cubes": nan, "sum_fourth_powers": nan}
    sketch, expected = (replace(s, **unknown) for s in (record.sketch, sketch_array(values)))
    assert_moments_close(sketch, expected, rtol=rtol)
    if not sampled:
        np.testing.assert_array_equal(sketch.buckets, expected.buckets)
        np.testing.assert_array_equal(sketch.counts, expected.counts)
    if axis is None or not values.size:
        assert record.unit_min is record.unit_max is None
        return
    others = tuple(other for other in range(values.ndim) if other != axis % values.ndim)
    with np.errstate(invalid="ignore"):  # NaN
        low, high = values.min(others), values.max(others)
    for found, wanted in ((record.unit_min, low), (record.unit_max, high)):
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted.astype(np.float32))

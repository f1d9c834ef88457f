"""Compares the CUDA kernels with PyTorch's operations on one GPU, in a separate process.

    python -m telemetry.measure.cuda_check INDEX

A fault on the device ends the process that causes it. So training uses the kernels on a model of
GPU only after they have passed here once: see :class:`telemetry.measure.cuda.Gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import inf, nan
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from telemetry.measure import cuda, nvrtc
from telemetry.measure.cuda_operations import DeviceRows
from telemetry.measure.tensors import Values
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.records.rows import Rows

# Shapes, and axes of units; some exceed the elements that all blocks of a GPU read at once.
_LAYOUTS = (
    *(((size,), None) for size in (1, 7, 513, 100_003, 6_000_001)),
    *(((64, 768), axis) for axis in (0, 1)),
    *(((8, 48, 49), axis) for axis in (0, 1, 2)),
    ((3, 4099), 1),
)
_SPECIAL = (0.0, -0.0, nan, inf, -inf, 1e-8, 6e4)
# Powers of neighbours are added up in float32.
_ROUNDING = 1e-5


def compare(gpu: cuda.Gpu, put: Callable[[Tensor], Tensor]) -> None:
    """Measure tensors of each dtype and layout with the kernels and with PyTorch's operations.

    Args:
        put: Copies a tensor to the GPU.

    Raises:
        ValueError: The results differ; the message says where.
    """
    for dtype in cuda.DTYPES:
        tensors = list(_tensors(dtype, put))
        expected = [_by_operations(tensor, axis) for tensor, axis in tensors]
        for (tensor, axis), rows in zip(tensors, expected, strict=True):
            _compare(gpu, [tensor], axis, rows)
        together = Rows.concatenate(expected).without_units()
        _compare(gpu, [tensor for tensor, _ in tensors], None, together)


def _tensors(
    dtype: torch.dtype, put: Callable[[Tensor], Tensor]
) -> Iterator[tuple[Tensor, int | None]]:
    random = torch.Generator().manual_seed(0)
    for (shape, axis), has_special, offset in product(_LAYOUTS, (False, True), (0, 1)):
        size = int(np.prod(shape))
        values = torch.randn(size + offset, generator=random).clamp(min=-0.5)
        if has_special:
            places = torch.randint(size + offset, (len(_SPECIAL),), generator=random)
            values[places] = torch.tensor(_SPECIAL)
        # With an offset it begins in the middle of 16 bytes.
        yield put(values.to(dtype))[offset:].view(shape), axis


def _by_operations(tensor: Tensor, axis: int | None) -> Rows:
    rows = DeviceRows()
    rows.add(Values(tensor, axis), 0)
    rows.send()
    return rows.decode()


def _compare(gpu: cuda.Gpu, tensors: list[Tensor], axis: int | None, expected: Rows) -> None:
    rows = cuda.GpuRows(gpu)
    taken = rows.add_all(tensors, 4, 0) if axis is None else [rows.add(tensors[0], axis, 4, 0)]
    rows.send()
    if not all(taken) or (different := _different(rows.decode(), expected)):
        what = f"{tensors[-1].dtype} {[list(tensor.shape) for tensor in tensors]}, axis {axis}"
        raise ValueError(f"{what}: {different if all(taken) else 'not all are measured'}")


def _different(rows: Rows, expected: Rows) -> str:
    """Return the names of columns that differ, separated by commas."""
    equal = partial(np.array_equal, equal_nan=True)
    exact = (*COUNTS, *EXTREMES, "bucket_count", "buckets", "counts", "unit_count", "units")
    names = [name for name in exact if not equal(getattr(rows, name), getattr(expected, name))]
    squares, fourth = expected.sum_squares, expected.sum_fourth_powers
    sizes = np.sqrt(expected.count * squares), squares, np.sqrt(squares * fourth), fourth
    for name, size in zip(POWER_SUMS, sizes, strict=True):
        if not (np.abs(getattr(rows, name) - getattr(expected, name)) <= _ROUNDING * size).all():
            names.append(name)
    return ", ".join(names)


def main(index: int) -> None:
    def put(tensor: Tensor) -> Tensor:
        return tensor.to(f"cuda:{index}")

    try:
        gpu = cuda.Gpu(index, checked=True)
        put(torch.ones(1))
    except (OSError, RuntimeError, MemoryError) as error:
        impossible(error)
    try:
        compare(gpu, put)
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        impossible(error)
    nvrtc.note_passed(index, gpu.kernels)


def impossible(error: Exception) -> NoReturn:
    """Exit with the status of a check that could not be done."""
    print(error, file=sys.stderr)
    sys.exit(nvrtc.NOT_CHECKED)


if __name__ == "__main__":
    main(int(sys.argv[1]))

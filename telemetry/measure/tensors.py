"""Finds the values of a tensor to measure, their layout in memory, and samples of large tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from telemetry.records.sketch import SAMPLE_ELEMENTS

# Below this many elements (the grain size is 32768), PyTorch's loops run on the calling thread.
# Above it they wait for a pool of threads: milliseconds, a thousand times the work itself, while
# other processes hold the cores.
SERIAL_ELEMENTS = 32_000

_FLOAT8 = tuple(
    [f"float8_{kind}" for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")]
)
_SMALL = ("float16", "bfloat16", "bool", "int8", "uint8", "int16", "uint16")
_FLOAT32 = ("float32", *_SMALL, *_FLOAT8)
# In float32, these would be rounded or, for the magnitude of complex numbers, overflow.
_COMPLEX = ("complex32", "bcomplex32", "complex64", "complex128")
_FLOAT64 = ("float64", "int32", "uint32", "int64", "uint64", *_COMPLEX)

# The dtype in which each measurable dtype of this PyTorch is reduced.
#
# Bit, quantized and 4-bit ones have none.
WORKING_DTYPE: dict[torch.dtype, torch.dtype] = {
    getattr(torch, name): working
    for working, names in ((torch.float32, _FLOAT32), (torch.float64, _FLOAT64))
    for name in names
    if hasattr(torch, name)
}


class Values(NamedTuple):
    """Stored values of one tensor, each once.

    Attributes:
        tensor: Strided, detached, of a measurable dtype, axes in the order of memory if it is
            dense. Complex numbers count with their magnitude.
        unit_axis: Axis of units in ``tensor``, not negative; None without units.
        implied_zeros: Number of zeros that a sparse tensor does not store.
    """

    tensor: Tensor
    unit_axis: int | None
    implied_zeros: int = 0

    def collapsed(self) -> Values:
        """Reshape a dense tensor to one axis, or to ``[outer, units, inner]``."""
        if not self.tensor.is_contiguous():
            return self
        if self.unit_axis is None:
            return Values(tensor=self.tensor.view(-1), unit_axis=None)
        shape = unit_shape(self.tensor.shape, self.unit_axis)
        return Values(tensor=self.tensor.view(shape), unit_axis=1)


def unit_shape(shape: Sequence[int], unit_axis: int) -> tuple[int, int, int]:
    """Return the number of elements before, along and after the axis of units."""
    return prod(shape[:unit_axis]), shape[unit_axis], prod(shape[unit_axis + 1 :])


def values_of(tensor: Tensor, unit_axis: int | None) -> Values | None:
    """Return the values of ``tensor`` to measure; None if it cannot be measured.

    Sparse tensors have no units here. Uncoalesced ones are measurable on the CPU only, because
    coalescing would wait for an accelerator.

    Raises:
        IndexError: The tensor has no axis ``unit_axis``.
    """
    if (
        tensor.dtype not in WORKING_DTYPE
        or tensor.is_meta
        or (tensor.is_mps and WORKING_DTYPE[tensor.dtype] is torch.float64)  # it has none
        or tensor.is_nested
        # A wrapper without its own values: FakeTensor, DTensor, a functional tensor.
        or type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return None
    if tensor.requires_grad or type(tensor) is not Tensor:
        tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return _stored_values(tensor)
    if tensor.is_neg() or not tensor.data_ptr():
        tensor = tensor.clone()  # its memory holds negated values, or is absent: all zeros
    if unit_axis is not None:
        if not -tensor.ndim <= unit_axis < tensor.ndim:
            raise IndexError(f"unit_axis={unit_axis}: the tensor has {tensor.ndim} axes")
        unit_axis %= tensor.ndim
    if tensor.is_contiguous():
        return Values(tensor=tensor, unit_axis=unit_axis)
    return in_memory_order(tensor, unit_axis)


def _stored_values(tensor: Tensor) -> Values | None:
    if tensor.layout is torch.sparse_coo:
        if not (tensor.is_cpu or tensor.is_coalesced()):
            return None
        stored = tensor.coalesce().values()
    elif tensor.is_mkldnn:
        stored = tensor.to_dense()
    else:
        stored = tensor.values()
    return Values(
        tensor=stored.contiguous(), unit_axis=None, implied_zeros=tensor.numel() - stored.numel()
    )


def in_memory_order(tensor: Tensor, unit_axis: int | None) -> Values:
    """Permute the axes of a dense tensor to the order of memory; others are unchanged."""
    stride = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -stride[axis])
    permuted = tensor.permute(order)
    if not permuted.is_contiguous():
        return Values(tensor=tensor, unit_axis=unit_axis)
    return Values(tensor=permuted, unit_axis=None if unit_axis is None else order.index(unit_axis))


def pieces(shape: Sequence[int], limit: int) -> Iterator[tuple[slice, ...]]:
    """Yield indices of pieces of at most ``limit`` elements of a non-empty tensor, in its order.

    Pieces of a contiguous tensor are contiguous.
    """
    cuts, count = [], prod(shape)
    for size in shape:
        step = size if count <= limit else max(1, size * limit // count)
        cuts.append([slice(first, min(first + step, size)) for first in range(0, size, step)])
        count = count // size * step
    return product(*cuts)


def working(tensor: Tensor) -> Tensor:
    """Convert to the working dtype, complex numbers to magnitudes; copies only if needed."""
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs()
    return tensor.to(WORKING_DTYPE[tensor.dtype])


# --- samples -------------------------------------------------------------------------------------

# Larger tensors have the histogram of a sample: counting all takes twice the time of the rest.
FULL_ELEMENTS = 65_536

# A sample is runs of this many elements, a prime number of elements apart. A step that divides a
# tensor's sizes, such as a power of two, would see only a few channels or columns.
_RUN = 16


def block_sample(tensor: Tensor, elements: int = SAMPLE_ELEMENTS) -> Tensor:
    """Return about so many elements spread evenly over a larger tensor, always the same ones.

    PyTorch's loops over no more elements run on the calling thread.

    Returns:
        Shape ``[k, 16]``, on the same device; a view if the tensor is dense. The whole tensor if
        it has at most ``elements``.
    """
    if tensor.numel() <= elements:
        return tensor
    if not tensor.is_contiguous():
        tensor = in_memory_order(tensor, None).tensor.contiguous()
    step = _distance(tensor.numel(), elements)
    count = (tensor.numel() - _RUN) // step + 1
    return tensor.as_strided((count, _RUN), (step, 1), tensor.storage_offset())


@lru_cache(maxsize=4096)
def sample_step(count: int) -> int:
    """Return the elements between the starts of two runs of a sample; 0 if all are counted."""
    return 0 if count <= FULL_ELEMENTS else _distance(count, SAMPLE_ELEMENTS)


@lru_cache(maxsize=4096)
def _distance(count: int, elements: int) -> int:
    step = -(-_RUN * count // elements)
    while any(step % divisor == 0 for divisor in range(2, int(step**0.5) + 1)):
        step += 1
    return step


def fingerprint(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a weighted sum of the values, or of a fixed sample; their order changes it, too.

    Args:
        tensor: Any dtype and device. Does not wait for the device.

    Returns:
        One float32, shape ``[]``, on the tensor's device: equal for equal values on that device,
        and hardly ever for others. Nothing for a tensor without dense values.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_meta:
        return
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    sample = block_sample(values).reshape(-1).to(torch.float32)
    weights = torch.linspace(1.0, 2.0, sample.numel(), device=sample.device)
    # No scalar product: its rounding depends on where in memory the values are.
    yield (sample * weights).sum()

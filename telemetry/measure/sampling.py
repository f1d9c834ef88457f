"""Samples of large tensors, for histograms and for recognizing a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from telemetry.measure.tensors import in_memory_order
from telemetry.records.sketch import SAMPLE_ELEMENTS

# Larger tensors have the histogram of a sample: counting all takes twice the time of the rest.
FULL_ELEMENTS = 65_536

# A sample is runs of this many elements, a prime number of elements apart. A step that divides a
# tensor's sizes, such as a power of two, would see only a few channels or columns.
_RUN = 16


def block_sample(tensor: Tensor) -> Tensor:
    """Return about 32,768 elements spread evenly over a larger tensor, always the same ones.

    PyTorch's loops over no more elements run on the calling thread.

    Returns:
        Shape ``[k, 16]``, on the same device; a view if the tensor is dense. The whole tensor if
        it has at most 32,768 elements.
    """
    if tensor.numel() <= SAMPLE_ELEMENTS:
        return tensor
    flat = in_memory_order(tensor, None).tensor.contiguous().view(-1)
    step = _distance(tensor.numel())
    count = (flat.numel() - _RUN) // step + 1
    return flat.as_strided((count, _RUN), (step, 1), flat.storage_offset())


@lru_cache(maxsize=4096)
def sample_step(count: int) -> int:
    """Return the elements between the starts of two runs of a sample; 0 if all are counted."""
    return 0 if count <= FULL_ELEMENTS else _distance(count)


@lru_cache(maxsize=4096)
def _distance(count: int) -> int:
    step = -(-_RUN * count // SAMPLE_ELEMENTS)
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
    # Not cached on a GPU: another stream may not have computed them yet.
    weights = _weights if tensor.is_cpu else _weights.__wrapped__
    # No scalar product: its rounding depends on where in memory the values are.
    yield (sample * weights(sample.numel(), tensor.device)).sum()


@lru_cache(maxsize=2)
def _weights(count: int, device: torch.device) -> Tensor:
    """Weights, cached because making them takes three quarters of the time."""
    return torch.linspace(1.0, 2.0, count, device=device)

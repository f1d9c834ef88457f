"""Samples of large tensors, for histograms and for recognizing a tensor."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from telemetry.measure.tensors import in_memory_order

# The histogram of a larger tensor is that of a sample: it takes twice as long as the rest.
FULL_ELEMENTS = 65_536

# Approximate number of elements in a sample.
SAMPLE_ELEMENTS = 32_768

# A sample is runs of this many elements, a prime number of elements apart. A step that divides a
# tensor's sizes, such as a power of two, would see only a few channels or columns.
_RUN = 16


def block_sample(tensor: Tensor) -> Tensor:
    """About 32,768 elements spread evenly over a larger tensor, always at the same places.

    Not more, for PyTorch's loops over as many run on the calling thread.

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
    """Elements between the starts of two runs of a histogram's sample; 0 if all are counted."""
    return 0 if count <= FULL_ELEMENTS else _distance(count)


@lru_cache(maxsize=4096)
def _distance(count: int) -> int:
    step = -(-_RUN * count // SAMPLE_ELEMENTS)
    while any(step % divisor == 0 for divisor in range(2, int(step**0.5) + 1)):
        step += 1
    return step


def fingerprint(tensor: Tensor) -> Iterator[Tensor]:
    """A weighted sum of the values, or of a fixed sample of them; it tells their order, too.

    Args:
        tensor: Of any dtype and on any device, which is not waited for.

    Returns:
        One float32, shape ``[]``, on the tensor's device: the same for the same values on the same
        device, and hardly ever for others. Nothing for a tensor that has no dense values.
    """
    if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_quantized:
        return
    if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__ or tensor.is_meta:
        return
    values = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    sample = block_sample(values).reshape(-1).to(torch.float32)
    # On a GPU not those of another stream, which may not have made them yet.
    weights = _weights if tensor.is_cpu else _weights.__wrapped__
    # No scalar product: its rounding depends on where in memory the values are.
    yield (sample * weights(sample.numel(), tensor.device)).sum()


@lru_cache(maxsize=2)
def _weights(count: int, device: torch.device) -> Tensor:
    """Making them takes three quarters of the time."""
    return torch.linspace(1.0, 2.0, count, device=device)

"""Samples of large tensors, and histograms from codes of leading bits.

A code is the upper 12 bits of a float32 number after rounding it to bfloat16: sign, exponent and
three bits of mantissa. Codes 0..2047 are bucket 0, 1, ... of positive numbers, 2048..4095 those of
negative ones; see :func:`telemetry.sketch.edges`.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.moments import FloatArray, RunningMoments
from telemetry.measure.tensors import SERIAL_ELEMENTS, in_memory_order
from telemetry.sketch import LAST_BUCKET, bucket_indices

FULL_ELEMENTS = 131_072
"""Tensors of more elements are sampled for their histogram: to gather is slower than to copy."""

SAMPLE_ELEMENTS = 65_536
"""About so many elements are in a sample."""

# Runs of this many elements, a prime number of elements apart. A step that divides a tensor's sizes
# (any power of two) would see the same few channels or columns only.
_RUN = 16

CODES = 4096
_NEGATIVE = CODES // 2


def block_sample(tensor: Tensor) -> Tensor:
    """About 65,536 elements spread evenly over a larger tensor, always the same ones.

    Returns:
        Shape ``[k, 16]``, on the same device; a view if the tensor is dense. All of the tensor if
        it has at most 131,072 elements.
    """
    step = sample_step(tensor.numel())
    if step == 0:
        return tensor
    return _runs(in_memory_order(tensor, None).tensor.contiguous().view(-1), step)


@lru_cache(maxsize=4096)
def sample_step(count: int) -> int:
    """Elements from one run of a sample to the next; 0 if everything is taken."""
    if count <= FULL_ELEMENTS:
        return 0
    step = -(-_RUN * count // SAMPLE_ELEMENTS)
    while any(step % divisor == 0 for divisor in range(2, int(step**0.5) + 1)):
        step += 1
    return step


def _runs(flat: Tensor, step: int) -> Tensor:
    count = (flat.numel() - _RUN) // step + 1
    return flat.as_strided((count, _RUN), (step, 1), flat.storage_offset())


_RUNS = {dtype: np.dtype((np.void, _RUN * dtype().itemsize)) for dtype in (np.float32, np.float64)}


def _gather(flat: FloatArray, step: int, first: int, target: FloatArray) -> int:
    """Copy the runs that begin at ``first`` to ``target``; how many elements that are."""
    count = (flat.size - first - _RUN) // step + 1
    if count <= 0:
        return 0
    run = _RUNS[flat.dtype.type]  # NumPy copies it as a single item
    at, stride = first * flat.itemsize, step * flat.itemsize
    runs: NDArray[np.void] = np.ndarray((count,), run, flat.data, at, (stride,))
    target[: count * _RUN].view(run)[:] = runs
    return count * _RUN


class Sample:
    """A sample of one tensor's values.

    Args:
        count: Elements of the tensor.
        memory: Where to keep the sample: 1-D, of the dtype of the values, :func:`sample_size` of
            ``count`` elements.
    """

    def __init__(self, count: int, memory: FloatArray) -> None:
        self._step = sample_step(count)
        self._memory = memory
        self._seen = 0
        self._taken = 0

    def add(self, flat: FloatArray) -> None:
        """Take some of the tensor, or of its next piece: 1-D and contiguous."""
        target = self._memory[self._taken :]
        if self._step:
            self._taken += _gather(flat, self._step, -self._seen % self._step, target)
        else:
            target[: flat.size] = flat
            self._taken += flat.size
        self._seen += flat.size

    def histogram(self, moments: RunningMoments) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
        """Buckets and counts of the tensor that has these moments.

        The sample says how the values that are not zero are distributed; zeros are counted exactly,
        and the buckets of the minimum and the maximum are always there.
        """
        values = self._memory[: self._taken]
        if moments.finite_count < moments.count:
            values = values[np.isfinite(values)]
        with np.errstate(over="ignore"):  # of float64
            buckets, counts = histogram_of_codes(_count_codes(codes_of(values)), 0, 0)
        if counts.sum() == moments.finite_count:
            return buckets, counts
        return _scaled(buckets, counts, values.size - int(np.count_nonzero(values)), moments)


def sample_size(count: int) -> int:
    """Elements of memory that a :class:`Sample` needs for a tensor of ``count`` elements."""
    step = sample_step(count)
    return _RUN * (count // step + 1) if step else count


def codes_of(values: FloatArray) -> NDArray[np.uint16]:
    """The code of each number; of NaN an arbitrary one."""
    bits = values.astype(np.float32, copy=False).view(np.uint32) + np.uint32(0x8000)
    codes: NDArray[np.uint16] = np.right_shift(bits, np.uint32(20), out=bits).astype(np.uint16)
    return codes


def _count_codes(codes: NDArray[np.uint16]) -> NDArray[np.int64]:
    counts = np.zeros(CODES, np.int64)
    for part in torch.from_numpy(codes.view(np.int16)).split(SERIAL_ELEMENTS):
        counts += torch.bincount(part, minlength=CODES).numpy()
    return counts


def histogram_of_codes(
    code_counts: NDArray[np.integer], positive_inf_count: int, negative_inf_count: int
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Non-empty buckets of the finite values, ascending, and their counts.

    Args:
        code_counts: How often each code occurs, shape ``[4096]``.
        positive_inf_count: How many of them are ``+inf``: finite numbers from 3.396e38 on have the
            same code, and belong to the last bucket.
        negative_inf_count: The same for ``-inf``.
    """
    by_bucket = np.concatenate([code_counts[:_NEGATIVE:-1], code_counts[:_NEGATIVE]])
    zero = _NEGATIVE - 1
    by_bucket[zero] += code_counts[_NEGATIVE]
    first, last = zero - LAST_BUCKET, zero + LAST_BUCKET
    by_bucket[first] += max(by_bucket[first - 1] - negative_inf_count, 0)
    by_bucket[last] += max(by_bucket[last + 1] - positive_inf_count, 0)
    finite = by_bucket[first : last + 1]
    (filled,) = finite.astype(np.bool_).nonzero()
    return (filled - LAST_BUCKET).astype(np.int16), finite[filled].astype(np.float64)


def _scaled(
    buckets: NDArray[np.int16],
    counts: NDArray[np.float64],
    zeros_taken: int,
    moments: RunningMoments,
) -> tuple[NDArray[np.int16], NDArray[np.float64]]:
    """Scale a sample's histogram up to all finite values of the tensor."""
    dense = np.zeros(2 * LAST_BUCKET + 1)
    dense[buckets.astype(np.intp) + LAST_BUCKET] = counts
    dense[LAST_BUCKET] -= zeros_taken
    nonzero_count = moments.finite_count - moments.zero_count
    if nonzero_count:
        extremes = np.array([x for x in (moments.min, moments.max) if x != 0])
        slots = bucket_indices(extremes).astype(np.intp) + LAST_BUCKET
        dense[slots] = np.maximum(dense[slots], 1)
        dense *= nonzero_count / dense.sum()
    dense[LAST_BUCKET] += moments.zero_count
    filled = np.flatnonzero(dense)
    return (filled - LAST_BUCKET).astype(np.int16), dense[filled]

"""Everything but the units' extremes of a tensor on a GPU, in a single read of it.

Importing this module needs Triton. :mod:`telemetry.measure.device` has the same in PyTorch's own
operations, of which each reads the tensor once or more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from telemetry.measure.sampling import CODES

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""What the kernel reads: dtypes of which float32 holds every number."""

# Elements that a program takes at a time. To collect a block's histogram costs as much as to count
# about a thousand elements.
_BLOCK = 16_384
_WARPS = 16

# Programs on each multiprocessor: one counts while the other waits for memory.
_PROGRAMS = 2

# NaN, +inf, -inf, zero, sum, sum of squares, minimum, maximum.
_STATISTICS = 8


@triton.jit
def _reduce(  # type: ignore[no-untyped-def]
    values,
    statistics,
    code_counts,
    count,
    BLOCK: tl.constexpr,  # noqa: N803
    CODES: tl.constexpr,  # noqa: N803
):
    """Counts of codes, added up over all programs, and a row of statistics from each.

    Sums are taken in float64, of whose range no float32 square leaves, and tests look at the bits:
    a GPU may take denormal numbers for zeros.
    """
    program = tl.program_id(0)
    stride = tl.num_programs(0).to(tl.int64) * BLOCK
    nan = tl.zeros((), tl.int64)
    positive_inf = tl.zeros((), tl.int64)
    negative_inf = tl.zeros((), tl.int64)
    zero = tl.zeros((), tl.int64)
    total = tl.zeros((), tl.float64)
    squares = tl.zeros((), tl.float64)
    low = tl.full((), float("inf"), tl.float64)
    high = tl.full((), float("-inf"), tl.float64)
    counts = tl.zeros((CODES,), tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in range(program.to(tl.int64) * BLOCK, count, stride):
        there = start + lanes < count
        x = tl.load(values + start + lanes, mask=there, other=0.0).to(tl.float32)
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        is_nan = magnitude > 0x7F800000
        is_inf = magnitude == 0x7F800000
        finite = there & (magnitude < 0x7F800000)
        nan += tl.sum((there & is_nan).to(tl.int32), 0)
        positive_inf += tl.sum((there & is_inf & (bits > 0)).to(tl.int32), 0)
        negative_inf += tl.sum((there & is_inf & (bits < 0)).to(tl.int32), 0)
        zero += tl.sum((there & (magnitude == 0)).to(tl.int32), 0)
        wide = tl.where(finite, x, 0.0).to(tl.float64)
        total += tl.sum(wide, 0)
        squares += tl.sum(wide * wide, 0)
        low = tl.minimum(low, tl.min(tl.where(finite, wide, float("inf")), 0))
        high = tl.maximum(high, tl.max(tl.where(finite, wide, float("-inf")), 0))
        # Half a bfloat16 unit and a shift; adding it to a NaN may overflow, so those stay out.
        codes = ((bits + 0x8000) >> 20) & (CODES - 1)
        counts += tl.histogram(codes, CODES, mask=there & (magnitude <= 0x7F800000))
    row = statistics + program * 8
    tl.store(row, nan.to(tl.float64))
    tl.store(row + 1, positive_inf.to(tl.float64))
    tl.store(row + 2, negative_inf.to(tl.float64))
    tl.store(row + 3, zero.to(tl.float64))
    tl.store(row + 4, total)
    tl.store(row + 5, squares)
    tl.store(row + 6, low)
    tl.store(row + 7, high)
    wide_counts = counts.to(tl.int64)
    tl.atomic_add(code_counts + tl.arange(0, CODES), wide_counts, mask=wide_counts > 0)


def statistics_and_codes(tensor: Tensor) -> Tensor:
    """What :mod:`telemetry.measure.device` begins a row with.

    Args:
        tensor: Contiguous, not empty, of one of :data:`DTYPES`, on a GPU.

    Returns:
        float64, shape ``[8 + 4096]``, on the same device: counts of NaN, +inf, −inf and zero; sum,
        sum of squares, minimum (``inf`` if there is none) and maximum (``-inf``) of the finite
        values; how often each code occurs, those of NaN left out.
    """
    device, count = tensor.device, tensor.numel()
    programs = min(triton.cdiv(count, _BLOCK), _PROGRAMS * _multiprocessors(device))
    statistics = torch.empty((programs, _STATISTICS), dtype=torch.float64, device=device)
    codes = torch.zeros(CODES, dtype=torch.int64, device=device)
    with torch.accelerator.device_index(device.index):
        _reduce[(programs,)](
            tensor, statistics, codes, count, BLOCK=_BLOCK, CODES=CODES, num_warps=_WARPS
        )
    sums, low, high = statistics[:, :6].sum(0), statistics[:, 6].amin(), statistics[:, 7].amax()
    return torch.cat([sums, low[None], high[None], codes.to(torch.float64)])


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

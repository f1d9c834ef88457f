"""Measures a tensor on a GPU in a single read, except for the extremes of its units.

Importing this module needs Triton, as recent as that of PyTorch 2.9 at least.
:mod:`telemetry.measure.device` computes the same with PyTorch's own operations, each of which reads
the tensor at least once.

A fixed number of programs share a tensor. Each takes tile after tile, accumulates in registers, and
adds to the result once, at its end. Codes are counted in shared memory; with a recent Triton, the
instruction for that is not slowed down by equal codes (``ATOMS.POPC.INC``).
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from telemetry.measure.sampling import CODES

# Since that came, the atomic extremes take -0.0 for the zero that it is, too.
if "mask" not in signature(tl.histogram).parameters:
    raise ImportError(f"Triton {triton.__version__} has no histograms with a mask")

DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
"""The dtypes that the kernel reads: float32 holds all of their numbers."""

# The counters are cleared and read for every tile, so a tile has more elements than there are
# counters; but its 16 elements per thread must fit into registers. With 64 registers per thread,
# two programs run on a multiprocessor at a time: one waits for memory while the other counts.
_TILE = 8192
_WARPS = 16
_THREADS = 32 * _WARPS
_PROGRAMS = 2
_OPTIONS: dict[str, Any] = {"enable_fp_fusion": True}
if torch.version.cuda:
    _OPTIONS["maxnreg"] = 64

# Bytes that a thread loads at once.
_VECTOR_BYTES = 16

# The codes of finite numbers end at that of infinity, to which the largest are rounded, for both
# signs. Some codes beyond it count zeros, infinities and NaN.
_ROUNDED_TO_INF = tl.constexpr(2040)
_ZERO = tl.constexpr(2045)
_INF = tl.constexpr(2046)
_NAN = tl.constexpr(2047)
_NEGATIVE = tl.constexpr(2048)


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    values,
    row,
    count,
    tile: tl.constexpr,
    threads: tl.constexpr,
    vector: tl.constexpr,
    codes: tl.constexpr,
):
    """Add ``count`` values to a row of statistics."""
    first = tl.program_id(0).to(tl.int64) * tile
    step = tl.num_programs(0).to(tl.int64) * tile
    whole = count.to(tl.int64) // tile * tile
    places = tl.arange(0, tile)
    nothing = tl.zeros((threads,), tl.float64)
    sums = (nothing, nothing, nothing, nothing)
    low = tl.full((threads,), float("inf"), tl.float32)
    high = tl.full((threads,), float("-inf"), tl.float32)
    counts = tl.zeros((codes,), tl.int32)
    for start in range(first, whole, step):
        # Without a mask, so that a thread loads 16 bytes at a time.
        x = tl.load(values + start + places).to(tl.float32)
        sums = _power_sums(x, sums, threads, vector)
        low, high = _extremes(x, low, high, threads, vector)
        counts += tl.histogram(_codes(x), codes)
    if first == 0:
        there = places < (count - whole).to(tl.int32)
        x = tl.load(values + whole + places, mask=there, other=float("nan")).to(tl.float32)
        sums = _power_sums(x, sums, threads, vector)
        low, high = _extremes(x, low, high, threads, vector)
        counts += tl.histogram(_codes(x), codes, mask=there)
    _add_counts(row, counts, codes)
    for i in tl.static_range(4):
        tl.atomic_add(row + 4 + i, tl.sum(sums[i], 0), sem="relaxed")
    tl.atomic_min(row + 8, tl.min(low, 0).to(tl.float64), sem="relaxed")
    tl.atomic_max(row + 9, tl.max(high, 0).to(tl.float64), sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _power_sums(x, sums, threads: tl.constexpr, vector: tl.constexpr):  # type: ignore[no-untyped-def]
    """Adds a tile's finite values to each thread's four power sums.

    A thread has loaded ``vector`` elements at a time, so threads exchange nothing. In float64 no
    fourth power of a float32 number overflows.
    """
    x = tl.reshape(x, (x.shape[0] // (threads * vector), threads, vector))
    wide = tl.where(_is_finite(x), x, 0.0).to(tl.float64)
    squares = wide * wide
    return (
        sums[0] + tl.sum(tl.sum(wide, 2), 0),
        sums[1] + tl.sum(tl.sum(squares, 2), 0),
        sums[2] + tl.sum(tl.sum(squares * wide, 2), 0),
        sums[3] + tl.sum(tl.sum(squares * squares, 2), 0),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _extremes(x, low, high, threads: tl.constexpr, vector: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.reshape(x, (x.shape[0] // (threads * vector), threads, vector))
    finite = _is_finite(x)
    low = tl.minimum(low, tl.min(tl.min(tl.where(finite, x, float("inf")), 2), 0))
    high = tl.maximum(high, tl.max(tl.max(tl.where(finite, x, float("-inf")), 2), 0))
    return low, high


@triton.jit
def _is_finite(x):  # type: ignore[no-untyped-def]
    return (x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) < 0x7F800000


@triton.jit
def _codes(x):  # type: ignore[no-untyped-def]
    """Codes of float32 numbers, with others for zeros, infinities and NaN.

    Tests look at bits: a GPU may take denormal numbers for zeros.
    """
    bits = x.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    other = tl.where(magnitude > 0x7F800000, _NAN, ((bits >> 20) & _NEGATIVE) | _INF)
    # Half a bfloat16 unit, and a shift. What ties to even differs from what ties upwards in the
    # last bit of a bfloat16 number only, which is shifted out.
    code = tl.where(magnitude == 0, _ZERO, (bits + 0x8000) >> 20)
    code = tl.where(magnitude < 0x7F800000, code, other)
    return code.to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _add_counts(row, counts, codes: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add what a program counted to the row: zeros and infinities also to their own codes."""
    code = tl.arange(0, codes)
    nan = tl.sum(tl.where(code == _NAN, counts, 0), 0)
    zero = tl.sum(tl.where(code == _ZERO, counts, 0), 0)
    positive_inf = tl.sum(tl.where(code == _INF, counts, 0), 0)
    negative_inf = tl.sum(tl.where(code == _NEGATIVE + _INF, counts, 0), 0)
    counts = tl.where((code & (_NEGATIVE - 1)) > _ROUNDED_TO_INF, 0, counts)
    counts += tl.where(code == 0, zero, 0)
    counts += tl.where(code == _ROUNDED_TO_INF, positive_inf, 0)
    counts += tl.where(code == _NEGATIVE + _ROUNDED_TO_INF, negative_inf, 0)
    tl.atomic_add(row, nan.to(tl.float64), sem="relaxed")
    tl.atomic_add(row + 1, positive_inf.to(tl.float64), sem="relaxed")
    tl.atomic_add(row + 2, negative_inf.to(tl.float64), sem="relaxed")
    tl.atomic_add(row + 3, zero.to(tl.float64), sem="relaxed")
    tl.atomic_add(row + 10 + code, counts.to(tl.float64), mask=counts > 0, sem="relaxed")


def add_statistics(tensor: Tensor, row: Tensor) -> None:
    """Add the statistics of a tensor to a row of a device buffer, without waiting for the device.

    What is added up over programs depends in its last bits on the order in which they end.

    Args:
        tensor: Contiguous, not empty, of one of :data:`DTYPES`, on a GPU.
        row: float64, shape ``[10 + 4096]``, on the same device: counts of NaN, +inf, −inf and zero;
            four power sums, minimum and maximum of the finite values; how often each code occurs,
            those of NaN left out and all zeros as the positive one.
    """
    count = tensor.numel()
    aligned = tensor.data_ptr() % _VECTOR_BYTES == 0
    programs = min(triton.cdiv(count, _TILE), _PROGRAMS * _multiprocessors(tensor.device))
    with torch.cuda.device_of(tensor):
        _reduce[(programs,)](
            tensor,
            row,
            count,
            tile=_TILE,
            threads=_THREADS,
            vector=_VECTOR_BYTES // tensor.element_size() if aligned else 1,
            codes=CODES,
            num_warps=_WARPS,
            **_OPTIONS,
        )


def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":  # Triton's interpreter
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count

"""Reduces tensors on an accelerator, and copies the results to the host at the end of a step.

Nothing here may wait for the device. These would: reading a value, ``torch.bincount`` (it reads
the range back), boolean indexing, ``torch.tensor`` on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from math import inf, nan
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from telemetry.measure.sampling import CODES, histogram_of_codes
from telemetry.measure.tensors import Values, pieces, unit_shape, working
from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS, Moments
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch
from telemetry.torch_private.host_copy import HostCopy, current_stream, send

# Bounds the temporary memory, about 40 bytes for each element of a piece.
PIECE_ELEMENTS = 1 << 22

# A row begins with these: first the sums over all pieces, then the extremes.
_SUMS = (*COUNTS[1:], *POWER_SUMS)
_FIGURES = (*_SUMS, *EXTREMES)
_MINIMUM_AT, _MAXIMUM_AT = len(_SUMS), len(_SUMS) + 1
CODES_AT = len(_FIGURES)
_UNITS_AT = CODES_AT + CODES

_ROWS_AT_ONCE = 64

# Dtypes whose extremes PyTorch computes without a conversion.
_ORDERED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)

log = logging.getLogger("telemetry")

# The module of the Triton kernel after the first import, or None if it cannot be used.
_kernels: list[ModuleType | None] = []


class DeviceTensors:
    """The statistics of one step's tensors on one device: a row of numbers for each tensor."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._end = 0
        self._copy: HostCopy | None = None
        # For each stream on which tensors were added: blank rows for the kernel.
        self._streams: dict[Any, list[Tensor]] = {}

    def add(self, values: Values) -> Callable[[], TensorRecord]:
        """Reduce a non-empty tensor. Returns a function that gives its record after sending."""
        count = values.tensor.numel()
        values = values.collapsed()
        parts = [self._statistics(values.tensor)]
        if values.unit_axis is not None:
            parts += _unit_extremes(values.tensor, values.unit_axis)
        start, self._end = self._end, self._end + sum(map(len, parts))
        self._rows += parts
        return partial(self._record, slice(start, self._end), count)

    def send(self) -> int:
        """Start the copy to the host, and say how many bytes it has; nothing can be added then."""
        if not self._rows:  # adding failed
            return 0
        device = self._rows[0].device
        stream = current_stream(device)
        if stream is not None and set(self._streams) != {stream}:
            for other in self._streams:
                stream.wait_stream(other)
            for row in self._rows:
                row.record_stream(stream)
        rows = torch.cat(self._rows)
        self._copy = HostCopy(rows)
        send(device)
        self._rows.clear()
        self._streams.clear()
        return rows.nbytes

    def _statistics(self, tensor: Tensor) -> Tensor:
        """Sums, extremes and code counts, shape ``[10 + 4096]``, float64."""
        blank = self._streams.setdefault(current_stream(tensor.device), [])
        kernel = _kernel_for(tensor)
        if kernel is not None:
            if not blank:
                blank += _blank_rows(tensor.device)
            row = blank.pop()
            if _run(kernel, tensor, row):
                return row
        return _statistics(tensor)

    def _record(self, place: slice, count: int) -> TensorRecord:
        assert self._copy is not None, "send() comes first"
        row = self._copy.wait()[place]
        moments = moments_of(row, count)
        buckets, counts = histogram_of_codes(
            row[CODES_AT:_UNITS_AT].numpy(), moments.positive_inf_count, moments.negative_inf_count
        )
        sketch = Sketch.of(moments, buckets, counts)
        if len(row) == _UNITS_AT:
            return TensorRecord(sketch=sketch)
        low, high = row[_UNITS_AT:].to(torch.float32).chunk(2)
        return TensorRecord(sketch=sketch, unit_min=low.numpy(), unit_max=high.numpy())


def moments_of(row: Tensor, count: int) -> Moments:
    """The moments of ``count`` elements from a row, float64 and on the host."""
    known: dict[str, Any] = dict(zip(_FIGURES, row[:CODES_AT].tolist(), strict=True))
    known |= {name: int(known[name]) for name in COUNTS[1:]}
    moments = Moments(count=count, **known)
    return moments if moments.finite_count else replace(moments, min=nan, max=nan)


# --- in one read ---------------------------------------------------------------------------------


def _kernel_for(tensor: Tensor) -> ModuleType | None:
    """The module of the Triton kernel if it supports the tensor, else None."""
    if not tensor.is_cuda or not tensor.is_contiguous():
        return None
    kernel = _load_kernel()
    return kernel if kernel is not None and tensor.dtype in kernel.DTYPES else None


def _load_kernel() -> ModuleType | None:
    if not _kernels:
        try:
            _kernels.append(import_module("telemetry.measure.triton_kernel"))
        except ImportError:
            _kernels.append(None)
    return _kernels[0]


def _blank_rows(device: torch.device) -> Iterable[Tensor]:
    """Rows of an empty tensor; several, because one costs as much."""
    rows = torch.zeros(_ROWS_AT_ONCE, _UNITS_AT, dtype=torch.float64, device=device)
    rows[:, _MINIMUM_AT].fill_(inf)
    rows[:, _MAXIMUM_AT].fill_(-inf)
    return rows.unbind()


def _run(kernel: ModuleType, tensor: Tensor, row: Tensor) -> bool:
    """Add the tensor to the row with the kernel. After a failure the kernel is never used again."""
    try:
        kernel.add_statistics(tensor, row)
    # It is compiled at the first call, and every compiler fails in its own way.
    except Exception:
        log.warning(
            "telemetry: the GPU kernel failed; PyTorch measures instead, more slowly", exc_info=True
        )
        _kernels[:] = [None]
        return False
    return True


# --- in PyTorch's own operations -----------------------------------------------------------------


def _statistics(tensor: Tensor) -> Tensor:
    """Sums, extremes and code counts, shape ``[10 + 4096]``, float64."""
    device, exact = tensor.device, torch.float64
    sums = torch.zeros(len(_SUMS), dtype=exact, device=device)
    codes = torch.zeros(CODES, dtype=exact, device=device)
    low = torch.full((1,), inf, dtype=exact, device=device)
    high = torch.full((1,), -inf, dtype=exact, device=device)
    for index in pieces(tensor.shape, PIECE_ELEMENTS):
        x = working(tensor[index])
        sums += _sums(x, exact)
        codes += _code_counts(x)
        _lower(low, x.nan_to_num(inf, inf, inf).amin())
        _raise(high, x.nan_to_num(-inf, -inf, -inf).amax())
    return torch.cat([sums, low, high, codes])


def _unit_extremes(tensor: Tensor, axis: int) -> list[Tensor]:
    """Minimum and maximum of each unit, shape ``[units]``, float64; NaN for a unit with a NaN."""
    exact = torch.float64
    if tensor.dtype in _ORDERED:  # without temporary memory
        others = [other for other in range(tensor.ndim) if other != axis]
        if not others:
            return [tensor.to(exact), tensor.to(exact)]
        return [tensor.amin(others).to(exact), tensor.amax(others).to(exact)]
    size = tensor.shape[axis]
    low = torch.full((size,), inf, dtype=exact, device=tensor.device)
    high = torch.full((size,), -inf, dtype=exact, device=tensor.device)
    for index in pieces(tensor.shape, PIECE_ELEMENTS):
        x = working(tensor[index])
        units = x.reshape(unit_shape(x.shape, axis))
        _lower(low[index[axis]], units.amin((0, 2)))
        _raise(high[index[axis]], units.amax((0, 2)))
    return [low, high]


def _sums(x: Tensor, exact: torch.dtype) -> Tensor:
    """Counts of NaN, +inf, −inf and zero; power sums of the finite values."""
    finite = x.nan_to_num(0, 0, 0)
    squares = finite.to(exact).square()
    return torch.stack(
        [
            torch.isnan(x).sum(dtype=exact),
            (x == inf).sum(dtype=exact),
            (x == -inf).sum(dtype=exact),
            (x == 0).sum(dtype=exact),
            finite.sum(dtype=exact),
            squares.sum(),
            (squares * finite).sum(),
            squares.square().sum(),
        ]
    )


def _code_counts(x: Tensor) -> Tensor:
    """How often each code occurs, shape ``[4096]``, of an integer dtype."""
    codes = (x.to(torch.bfloat16).view(torch.int16) >> 4) & (CODES - 1)
    # Only CUDA has histc for integers (for floats it stops counting at 2^24); PyTorch up to 2.4
    # raises there in deterministic mode.
    if codes.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch.histc(codes.to(torch.int32), bins=CODES, min=0, max=CODES)
    ordered = codes.flatten().sort().values
    limits = torch.arange(CODES + 1, dtype=torch.int16, device=x.device)
    return torch.searchsorted(ordered, limits).diff()


def _lower(known: Tensor, new: Tensor) -> None:
    torch.minimum(known, new.to(known.dtype), out=known)


def _raise(known: Tensor, new: Tensor) -> None:
    torch.maximum(known, new.to(known.dtype), out=known)

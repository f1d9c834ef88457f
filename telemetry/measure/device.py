"""Tensors on an accelerator: reduced there, and brought to the host together at the end of a step.

Nothing here waits for the device. What would: reading a value, ``torch.bincount`` (it reads the
range back), boolean indexing, ``torch.where`` with a Python number (it is copied to the device).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np
import torch
from torch import Tensor

from telemetry.host_copy import HostCopy
from telemetry.measure.moments import Moments, tensor_record
from telemetry.measure.sampling import CODES, histogram_of_codes
from telemetry.measure.tensors import Values, pieces, unit_shape, working
from telemetry.records import TensorRecord

# Bounds the temporary memory, about 20 bytes for each element of a piece.
PIECE_ELEMENTS = 1 << 22

# Of these a row begins with the sums over all pieces; the minimum and the maximum follow.
_SUMS = 6
_EXTREMES = 2
_CODES_AT = _SUMS + _EXTREMES
_UNITS_AT = _CODES_AT + CODES


class DeviceTensors:
    """What is known of one step's tensors on one device: a row of numbers each."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._end = 0
        self._copy: HostCopy | None = None

    def add(self, values: Values) -> Callable[[], TensorRecord]:
        """Reduce a tensor; how to get its record after :meth:`send`."""
        row = _row(values)
        start, self._end = self._end, self._end + row.numel()
        self._rows.append(row)
        return partial(self._record, slice(start, self._end), values.tensor.numel())

    def send(self) -> None:
        """Start the copy to the host; nothing can be added any more."""
        if not self._rows:  # adding failed
            return
        if self._rows[0].is_cuda:
            stream = torch.cuda.current_stream(self._rows[0].device)
            for row in self._rows:  # may be of another stream
                row.record_stream(stream)
        self._copy = HostCopy(torch.cat(self._rows))
        self._rows.clear()

    def _record(self, place: slice, count: int) -> TensorRecord:
        assert self._copy is not None, "send() comes first"
        row = self._copy.wait().to(torch.float64).numpy()[place]
        nan, positive_inf, negative_inf, zero = (int(number) for number in row[:4])
        buckets, counts = histogram_of_codes(row[_CODES_AT:_UNITS_AT], positive_inf, negative_inf)
        moments = Moments(
            count=count,
            nan_count=nan,
            positive_inf_count=positive_inf,
            negative_inf_count=negative_inf,
            zero_count=zero,
            sum=float(row[4]),
            sum_squares=float(row[5]),
            min=float(row[6]),
            max=float(row[7]),
        )
        low, high = np.split(row[_UNITS_AT:], 2)
        return tensor_record(moments.sketch(buckets, counts), (low, high) if low.size else None)


def _row(values: Values) -> Tensor:
    """Sums, extremes, code counts and unit extremes of a tensor that is not empty, 1-D."""
    values = values.collapsed()
    device, axis = values.tensor.device, values.unit_axis
    exact = torch.float64
    sums = torch.zeros(_SUMS, dtype=exact, device=device)
    codes = torch.zeros(CODES, dtype=exact, device=device)
    unit_count = 0 if axis is None else values.tensor.shape[axis]
    low = torch.full((1 + unit_count,), inf, dtype=exact, device=device)
    high = torch.full((1 + unit_count,), -inf, dtype=exact, device=device)
    for index in pieces(values.tensor.shape, PIECE_ELEMENTS):
        x = working(values.tensor[index])
        sums += _sums(x, exact)
        codes += _code_counts(x)
        _lower(low[:1], x.nan_to_num(inf, inf, inf).amin())
        _raise(high[:1], x.nan_to_num(-inf, -inf, -inf).amax())
        if axis is not None:
            units = x.reshape(unit_shape(x.shape, axis))
            ours = slice(1 + index[axis].start, 1 + index[axis].stop)
            _lower(low[ours], units.amin((0, 2)))
            _raise(high[ours], units.amax((0, 2)))
    return torch.cat([sums, low[:1], high[:1], codes, low[1:], high[1:]])


def _sums(x: Tensor, exact: torch.dtype) -> Tensor:
    """Counts of NaN, +inf, −inf and zero; sum and sum of squares of the finite values."""
    finite = x.nan_to_num(0, 0, 0)
    return torch.stack(
        [
            torch.isnan(x).sum(dtype=exact),
            (x == inf).sum(dtype=exact),
            (x == -inf).sum(dtype=exact),
            (x == 0).sum(dtype=exact),
            finite.sum(dtype=exact),
            torch.linalg.vector_norm(finite, dtype=exact).square(),
        ]
    )


def _code_counts(x: Tensor) -> Tensor:
    """How often each code occurs, shape ``[4096]``, of an integer dtype."""
    codes = (x.to(torch.bfloat16).view(torch.int16) >> 4) & (CODES - 1)
    # CUDA alone has histc for integers (those of floats stop counting at 2^24); PyTorch up to 2.4
    # refused it in deterministic mode.
    if codes.is_cuda and not torch.are_deterministic_algorithms_enabled():
        return torch.histc(codes.to(torch.int32), bins=CODES, min=0, max=CODES)
    ordered = codes.flatten().sort().values
    limits = torch.arange(CODES + 1, dtype=torch.int16, device=x.device)
    return torch.searchsorted(ordered, limits).diff()


def _lower(known: Tensor, new: Tensor) -> None:
    torch.minimum(known, new.to(known.dtype), out=known)


def _raise(known: Tensor, new: Tensor) -> None:
    torch.maximum(known, new.to(known.dtype), out=known)

"""Reduces tensors on an accelerator, and copies the results to the host at the end of a step.

Nothing here may wait for the device. These would: reading a value, ``torch.bincount`` (it reads
the range back), boolean indexing, ``torch.tensor`` on the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import inf, nan
from typing import Any

import torch
from torch import Tensor

from telemetry.measure.sampling import CODES, histogram_of_codes
from telemetry.measure.tensors import Values, pieces, unit_shape, working
from telemetry.records import TensorRecord
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS, Moments
from telemetry.records.sketch import Sketch
from telemetry.torch_private.host_copy import HostCopy, current_stream, send

# Bounds the temporary memory, about 40 bytes for each element of a piece.
PIECE_ELEMENTS = 1 << 22

# A row begins with these: first the sums over all pieces, then the extremes.
_SUMS = (*COUNTS[1:], *POWER_SUMS)
_FIGURES = (*_SUMS, *EXTREMES)
CODES_AT = len(_FIGURES)
_UNITS_AT = CODES_AT + CODES


class DeviceTensors:
    """The statistics of one step's tensors on one device: a row of numbers for each tensor."""

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._end = 0
        self._copy: HostCopy | None = None
        self._streams: set[Any] = set()  # on which tensors were added

    def add(self, values: Values) -> Callable[[], TensorRecord]:
        """Reduce a non-empty tensor. Returns a function that gives its record after sending."""
        count = values.tensor.numel()
        values = values.collapsed()
        self._streams.add(current_stream(values.tensor.device))
        row = _statistics(values.tensor, values.unit_axis)
        start, self._end = self._end, self._end + len(row)
        self._rows.append(row)
        return partial(self._record, slice(start, self._end), count)

    def send(self) -> int:
        """Start the copy to the host, and say how many bytes it has; nothing can be added then."""
        if not self._rows:  # adding failed
            return 0
        device = self._rows[0].device
        stream = current_stream(device)
        if stream is not None and self._streams != {stream}:
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


def _statistics(tensor: Tensor, axis: int | None) -> Tensor:
    """Sums, extremes, code counts, then minimum and maximum of each unit; float64, in one axis.

    The extremes of a unit with a NaN are NaN.
    """
    size = 0 if axis is None else tensor.shape[axis]
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=tensor.device)
    codes = torch.zeros(CODES, dtype=torch.float64, device=tensor.device)
    low, high = _extremes(1, tensor.device)
    lowest, highest = _extremes(size, tensor.device)
    for index in pieces(tensor.shape, PIECE_ELEMENTS):
        x = working(tensor[index])
        sums += _sums(x, torch.float64)
        codes += _code_counts(x)
        _lower(low, x.nan_to_num(inf, inf, inf).amin())
        _raise(high, x.nan_to_num(-inf, -inf, -inf).amax())
        if axis is not None:
            units = x.reshape(unit_shape(x.shape, axis))
            _lower(lowest[index[axis]], units.amin((0, 2)))
            _raise(highest[index[axis]], units.amax((0, 2)))
    return torch.cat([sums, low, high, codes, lowest, highest])


def _extremes(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    low = torch.full((count,), inf, dtype=torch.float64, device=device)
    return low, -low


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

"""Reduces tensors on an accelerator with PyTorch's operations, and copies the results to the host.

No operation here waits for the device. These would: reading a value, ``torch.bincount`` (it reads
the range back), boolean indexing, ``torch.tensor`` on the device.
"""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.tensors import Values, pieces, unit_shape, working
from telemetry.records.buckets import LAST_BUCKET
from telemetry.records.moments import COUNTS, EXTREMES, POWER_SUMS, finite_of
from telemetry.records.rows import COLUMNS, Rows
from telemetry.torch_private.host_copy import HostCopy, current_stream, send

# Bounds the temporary memory, about 40 bytes for each element of a piece.
PIECE_ELEMENTS = 1 << 22

# The upper 12 bits of a float32 number after rounding it to bfloat16: sign, exponent and three bits
# of mantissa.
CODES = 4096

# Columns of a row, before the counts of all codes; the first ones are summed over pieces.
_SUMS = (*COUNTS[1:], *POWER_SUMS)
_FIGURES = (*_SUMS, *EXTREMES)
_WIDTH = len(_FIGURES) + CODES


class DeviceRows:
    """Rows of one step's tensors on one device."""

    def __init__(self) -> None:
        self.numbers: list[int] = []  # index of the tensor of each row
        self._counts: list[int] = []
        self._unit_counts: list[int] = []
        self._rows: list[Tensor] = []
        self._units: list[Tensor] = []
        self._copy: HostCopy | None = None
        self._streams: set[Any] = set()  # on which tensors were added

    def add(self, values: Values, number: int) -> None:
        """Reduce a non-empty tensor."""
        count, (tensor, axis, _) = values.tensor.numel(), values.collapsed()
        self._streams.add(current_stream(tensor.device))
        row, units = _statistics(tensor, axis)
        self._rows.append(row)
        self._units.append(units)
        self._counts.append(count)
        self._unit_counts.append(len(units))
        self.numbers.append(number)

    def send(self) -> int:
        """Start the copy to the host and return its bytes. Nothing can be added afterwards."""
        if not self._rows:  # adding failed
            return 0
        device = self._rows[0].device
        stream = current_stream(device)
        parts = [*self._rows, *(units.view(-1) for units in self._units)]
        if stream is not None and self._streams != {stream}:
            for other in self._streams:
                stream.wait_stream(other)
            for part in parts:
                part.record_stream(stream)
        sent = torch.cat(parts)
        self._copy = HostCopy(sent)
        send(device)
        self._rows.clear()
        self._units.clear()
        self._streams.clear()
        return sent.nbytes

    def decode(self) -> Rows:
        """Wait for the copy and return the rows."""
        if self._copy is None:
            return Rows.of(())
        copied = self._copy.wait().numpy()
        size = len(self.numbers) * _WIDTH
        dense, units = copied[:size].reshape(-1, _WIDTH), copied[size:].reshape(-1, 2)
        columns = np.zeros(len(dense), COLUMNS)
        for name, figures in zip(_FIGURES, dense.T, strict=False):
            columns[name] = figures
        columns["count"], columns["calls"] = self._counts, 1
        columns["unit_count"] = self._unit_counts
        positive, negative = columns["positive_inf_count"], columns["negative_inf_count"]
        by_bucket = _by_bucket(dense[:, len(_FIGURES) :], positive, negative)
        row, place = by_bucket.nonzero()
        columns["bucket_count"] = np.bincount(row, minlength=len(dense))
        buckets, counts = (place - LAST_BUCKET).astype(np.int16), by_bucket[row, place]
        rows = Rows(columns, buckets, counts, units.astype(np.float32))
        for name in EXTREMES:
            columns[name][finite_of(rows) == 0] = nan
        return rows


def _by_bucket(
    codes: NDArray[np.float64], positive_inf: NDArray[np.int64], negative_inf: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the count of each bucket of finite values, from the count of each code.

    Args:
        codes: Shape ``[rows, 4096]``. Codes 0 to 2047 are the buckets 0, 1, ... of positive
            numbers, 2048 to 4095 those of negative ones.
        positive_inf: Number of ``+inf``, ``[rows]``. Finite numbers from 3.396e38 on have the
            same code and belong to the last bucket.
        negative_inf: Number of ``-inf``, ``[rows]``.
    """
    negative = CODES // 2
    zero = negative - 1
    by_bucket = np.concatenate([codes[:, :negative:-1], codes[:, :negative]], axis=1)
    by_bucket[:, zero] += codes[:, negative]
    first, last = zero - LAST_BUCKET, zero + LAST_BUCKET
    by_bucket[:, first] += np.maximum(by_bucket[:, first - 1] - negative_inf, 0)
    by_bucket[:, last] += np.maximum(by_bucket[:, last + 1] - positive_inf, 0)
    return by_bucket[:, first : last + 1]


def _statistics(tensor: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return a row, and the smallest and largest value of each unit, ``[units, 2]``; float64.

    The extremes of a unit with a NaN are NaN.
    """
    size = 0 if axis is None else tensor.shape[axis]
    sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=tensor.device)
    codes = torch.zeros(CODES, dtype=torch.float64, device=tensor.device)
    low, high = _extremes(1, tensor.device)
    lowest, highest = _extremes(size, tensor.device)
    for index in pieces(tensor.shape, PIECE_ELEMENTS):
        x = working(tensor[index])
        sums += _sums(x)
        codes += _code_counts(x)
        _lower(low, x.nan_to_num(inf, inf, inf).amin())
        _raise(high, x.nan_to_num(-inf, -inf, -inf).amax())
        if axis is not None:
            units = x.reshape(unit_shape(x.shape, axis))
            _lower(lowest[index[axis]], units.amin((0, 2)))
            _raise(highest[index[axis]], units.amax((0, 2)))
    return torch.cat([sums, low, high, codes]), torch.stack([lowest, highest], dim=1)


def _extremes(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    low = torch.full((count,), inf, dtype=torch.float64, device=device)
    return low, -low


def _sums(x: Tensor) -> Tensor:
    """Return the counts of NaN, +inf, −inf and zero, and the power sums of finite values."""
    exact, finite = torch.float64, x.nan_to_num(0, 0, 0)
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
    """Return the count of each code, shape ``[4096]``, of an integer dtype."""
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

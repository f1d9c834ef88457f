"""Exact moments and extremes of values in CPU memory.

NumPy rather than PyTorch: its reductions are as fast, and never wait for a pool of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from telemetry.records import TensorRecord
from telemetry.sketch import Sketch

FloatArray = NDArray[np.floating]
FloatType = type[np.float32] | type[np.float64]

# Between these magnitudes, sums of a piece's squares neither overflow nor lose what matters.
_SAFE_MAGNITUDES = {np.dtype(np.float32): (1e-15, 1e15), np.dtype(np.float64): (1e-140, 1e140)}

# Elements of one dot product. BLAS computes it on the calling thread alone (OpenBLAS up to 10,000
# elements); and since the products are added up in float64, little is lost.
_DOT_ELEMENTS = 2048
_ONES = {dtype: np.ones(_DOT_ELEMENTS, dtype) for dtype in _SAFE_MAGNITUDES}

# To begin a row costs NumPy as much as some tens of elements. Many rows that are not long are taken
# several as one; rows that are short are reduced faster as columns of a transposed copy. Only where
# a unit has this many elements in a row is there nothing to gain.
_MANY_ROWS = 256
_LONG_ROW = 2048
_SHORT_ROW = 64
_LONG_INNER = 512


@dataclass(kw_only=True)
class RunningMoments:
    """Running counts, sums and extremes; the attributes are those of :class:`Sketch`."""

    count: int = 0
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    zero_count: int = 0
    min: float = inf
    max: float = -inf
    sum: float = 0.0
    sum_squares: float = 0.0
    sum_cubes: float = 0.0
    sum_fourth_powers: float = 0.0

    @property
    def finite_count(self) -> int:
        return self.count - self.nan_count - self.positive_inf_count - self.negative_inf_count

    def add(self, values: FloatArray, low: float, high: float, flags: NDArray[np.bool_]) -> None:
        """Count a piece of a tensor.

        Args:
            values: 1-D, contiguous, float32 or float64.
            low: Their minimum, NaN if any value is.
            high: Their maximum, likewise.
            flags: Scratch memory, at least as long as ``values``.
        """
        smallest, largest = _SAFE_MAGNITUDES[values.dtype]
        if not (smallest < max(-low, high) < largest or low == high == 0):
            self._add_unsafe(values)
            return
        self.count += values.size
        self.min = min(self.min, low)
        self.max = max(self.max, high)
        whole = values.size // _DOT_ELEMENTS * _DOT_ELEMENTS
        ones = _ONES[values.dtype]
        if whole:
            rows = values[:whole].reshape(-1, _DOT_ELEMENTS)
            self.sum += float(np.add.reduce(np.vecdot(rows, ones), dtype=np.float64))
            self.sum_squares += float(np.add.reduce(np.vecdot(rows, rows), dtype=np.float64))
        if whole < values.size:
            rest = values[whole:]
            self.sum += float(np.vecdot(rest, ones[: rest.size]))
            self.sum_squares += float(np.vecdot(rest, rest))
        self._add_higher_powers(values)
        if low <= 0 <= high:
            is_set = np.not_equal(values, 0, out=flags[: values.size])
            self.zero_count += values.size - int(np.count_nonzero(is_set))

    def _add_higher_powers(self, values: FloatArray) -> None:
        """In float64: fourth powers of gradients vanish in float32."""
        wide = values.astype(np.float64)
        squares = np.square(wide)
        self.sum_cubes += float(np.multiply(wide, squares, out=wide).sum())
        self.sum_fourth_powers += float(np.square(squares, out=squares).sum())

    def _add_unsafe(self, values: FloatArray) -> None:
        """The same for values that may be infinite, NaN, huge or tiny: slower, in float64."""
        finite: NDArray[np.float64] = values[np.isfinite(values)].astype(np.float64)
        self.count += values.size
        if finite.size < values.size:
            self.nan_count += int(np.count_nonzero(np.isnan(values)))
            self.positive_inf_count += int(np.count_nonzero(values == inf))
            self.negative_inf_count += int(np.count_nonzero(values == -inf))
        if finite.size:
            self.min = min(self.min, float(finite.min()))
            self.max = max(self.max, float(finite.max()))
            self.zero_count += finite.size - int(np.count_nonzero(finite))
            with np.errstate(over="ignore", invalid="ignore"):
                self.sum += float(finite.sum())
                self.sum_squares += float(np.square(finite).sum())
                self._add_higher_powers(finite)

    def sketch(self, buckets: NDArray[np.int16], counts: NDArray[np.float64]) -> Sketch:
        """These moments with a histogram."""
        known = vars(self)
        if not self.finite_count:
            known = known | {"min": nan, "max": nan}
        return Sketch(**known, buckets=buckets, counts=counts)


def tensor_record(sketch: Sketch, units: tuple[FloatArray, FloatArray] | None) -> TensorRecord:
    """The record of one tensor; copies the extremes of its units, if they are told apart."""
    if units is None:
        return TensorRecord(sketch=sketch)
    with np.errstate(over="ignore", invalid="ignore"):
        low, high = (extreme.astype(np.float32) for extreme in units)
    return TensorRecord(sketch=sketch, unit_min=low, unit_max=high)


def unit_extremes(values: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Minimum and maximum of each unit, NaN where it has one; not empty.

    Args:
        values: Shape ``[outer, units, inner]``, contiguous.

    Returns:
        Two arrays of shape ``[units]``, of the dtype of ``values``.
    """
    return _of_units(np.minimum, values), _of_units(np.maximum, values)


def _of_units(extreme: np.ufunc, values: FloatArray) -> FloatArray:
    outer, units, inner = values.shape
    if inner >= _LONG_INNER:
        of_units: FloatArray = extreme.reduce(values, axis=(0, 2))
        return of_units
    row = _over_rows(extreme, values.reshape(outer, units * inner))
    return row if inner == 1 else _along_rows(extreme, row.reshape(units, inner))


def _over_rows(extreme: np.ufunc, rows: FloatArray) -> FloatArray:
    """Reduce ``[m, n]`` to ``[n]``."""
    count, width = rows.shape
    if count == 1:
        return rows.reshape(width)
    if count < _MANY_ROWS or width >= _LONG_ROW:
        return _reduce(extreme, rows, axis=0)
    fold = min(2 * _LONG_ROW // width, count)
    whole = count // fold * fold
    folded = _reduce(extreme, rows[:whole].reshape(-1, fold * width), axis=0)
    rest = np.concatenate([folded.reshape(fold, width), rows[whole:]])
    return _along_rows(extreme, rest.T)


def _along_rows(extreme: np.ufunc, rows: FloatArray) -> FloatArray:
    """Reduce ``[m, n]`` to ``[m]``."""
    if rows.shape[1] < _SHORT_ROW:
        return _reduce(extreme, np.ascontiguousarray(rows.T), axis=0)
    return _reduce(extreme, np.ascontiguousarray(rows), axis=1)


def _reduce(extreme: np.ufunc, values: FloatArray, axis: int) -> FloatArray:
    reduced: FloatArray = extreme.reduce(values, axis=axis)
    return reduced

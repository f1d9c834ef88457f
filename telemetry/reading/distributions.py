"""Rebin the histograms of many steps to common bins, so that one picture can show them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.records.buckets import edges as bucket_edges

BINS = 80  # besides the one of exact zeros
# Share of each step's values that the bins must cover.
_COVERED = 0.999

# The bucket of zeros holds values below float32's smallest normal number.
_ZERO = float(bucket_edges()[1])
_VANISHED = 1e-6
_MAX_EDGE = 1e300  # leaves room for sums; infinite edges represent the largest number
_MAX_COUNT = 1e100  # above the size of any tensor; sums stay finite
_SMALLEST_UNIT = 1e-200  # also relative to the range, so that quotients stay finite


@dataclass(frozen=True, kw_only=True, eq=False)
class Distribution:
    """Shares of values per bin and step; the outermost bins include the values beyond them.

    Bins have equal width in ``asinh(x / unit)``: linear in the bulk of the values, logarithmic
    beyond it. Exact zeros, of which a ReLU returns many, have a separate bin and do not count for
    the bulk.
    """

    steps: NDArray[np.int64]  # ``[k]``
    edges: NDArray[np.float64]  # of the bins, ascending, ``[bins + 1]``
    shares: NDArray[np.float32]  # ``[k, bins]``; a row adds up to 1, or to 0 if it had no values
    unit: float  # where the axis turns from linear to logarithmic
    zero_bin: int | None = None  # bin of exact zeros; None without zeros


def histogram_table(value: object) -> NDArray[np.float64]:
    """Return left edges, right edges and counts, ``[buckets, 3]``; else raise ValueError."""
    if not isinstance(value, np.ndarray) or value.ndim != 2 or value.shape[1] != 3:
        raise ValueError("not a histogram of left edges, right edges and counts")
    table = value.astype(np.float64)
    table[:, :2] = np.clip(table[:, :2], -_MAX_EDGE, _MAX_EDGE)
    left, right, counts = table.T
    ascending = (left <= right).all() and (np.diff(right) >= 0).all()
    if not (ascending and ((counts >= 0) & (counts <= _MAX_COUNT)).all()):
        raise ValueError(
            "the histogram's edges do not ascend, or a count is negative, too large or not finite"
        )
    counts[counts < 1 / _MAX_COUNT] = 0.0
    return table


def distribution(tables: Sequence[tuple[int, NDArray[np.float64]]]) -> Distribution | None:
    """Combine the histogram tables of several steps; None if no histogram has a value."""
    if not any(table[:, 2].sum() > 0 for _, table in tables):
        return None
    zeros = [(np.abs(table[:, :2]) <= _ZERO).all(axis=1) for _, table in tables]
    has_zeros = any(t[is_zero, 2].sum() > 0 for (_, t), is_zero in zip(tables, zeros, strict=True))
    others = [t[~is_zero] for (_, t), is_zero in zip(tables, zeros, strict=True)]
    filled = [table for table in others if table[:, 2].sum() > 0] or [np.array([[0.0, 0.0, 1.0]])]
    spans = np.array([_quantiles(t, [(1 - _COVERED) / 2, (1 + _COVERED) / 2]) for t in filled])
    # Half of the values lie within the quartiles, so a unit of their size shows the bulk.
    bulk = np.array([np.abs(_quantiles(t, [0.25, 0.75])).max() for t in filled])
    low, high = float(spans[:, 0].min()), float(spans[:, 1].max())
    # Ignore steps at which nearly all values vanish.
    typical = bulk[bulk > bulk.max() * _VANISHED]
    size = max(abs(low), abs(high))
    unit = float(np.median(typical)) if typical.size else size or 1.0
    unit = max(unit, _SMALLEST_UNIT, size * _SMALLEST_UNIT)
    if has_zeros:  # a few values of the other sign get one bin
        ends = np.array([table[table[:, 2] > 0][[0, -1], [0, 1]] for table in filled])
        low = min(low, 0.0, max(ends[:, 0].min(), -2 * _ZERO))
        high = max(high, 0.0, min(ends[:, 1].max(), 2 * _ZERO))
    if low == high:
        margin = abs(low) / 2 or 1.0
        low, high = low - margin, high + margin
    edges, zero_bin = _edges(low, high, unit, has_zeros), None
    if has_zeros:
        edges = np.concatenate([edges[edges < -_ZERO], [-_ZERO, _ZERO], edges[edges > _ZERO]])
        zero_bin = int(np.searchsorted(edges, 0.0)) - 1
    return Distribution(
        steps=np.array([step for step, _ in tables], dtype=np.int64),
        edges=edges,
        shares=np.stack([_rebin(table, edges) for _, table in tables]),
        unit=unit,
        zero_bin=zero_bin,
    )


def _quantiles(table: NDArray[np.float64], shares: Sequence[float]) -> NDArray[np.float64]:
    below = np.concatenate([[0.0], np.cumsum(table[:, 2])])
    edges = np.concatenate([table[:1, 0], table[:, 1]])
    scale = float(np.abs(edges).max()) or 1.0  # so that no slope between two edges overflows
    quantiles: NDArray[np.float64] = np.interp(np.array(shares) * below[-1], below, edges / scale)
    return quantiles * scale


def _edges(low: float, high: float, unit: float, at_zero: bool) -> NDArray[np.float64]:
    """Return edges at equal distances in ``asinh(x / unit)``; ``at_zero``: one of them is zero."""
    first, last = np.arcsinh(low / unit), np.arcsinh(high / unit)
    places = np.linspace(first, last, BINS + 1)
    if at_zero:
        width = (last - first) / BINS
        places = width * np.arange(np.floor(first / width), np.ceil(last / width) + 1)
    with np.errstate(over="ignore"):
        edges: NDArray[np.float64] = unit * np.sinh(places)
    if not at_zero:
        edges[0], edges[-1] = low, high
    return edges


def _rebin(table: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.float32]:
    left, right, counts = table.T
    total = counts.sum()
    if total <= 0:
        return np.zeros(len(edges) - 1, np.float32)
    middle = (left + right) / 2
    wide = right > left
    # A bucket without width holds a single value, so it goes into one bin as a whole.
    points = np.histogram(np.clip(middle[~wide], edges[0], edges[-1]), edges, weights=counts[~wide])
    left, right, counts = left[wide], right[wide], counts[wide]
    bounds = np.concatenate([left, right[-1:]])
    below = np.concatenate([[0.0], np.cumsum(counts)])
    at_edges = np.interp(edges, bounds, below) if len(left) else np.zeros(len(edges))
    at_edges[0], at_edges[-1] = 0.0, below[-1]
    shares: NDArray[np.float32] = ((np.diff(at_edges) + points[0]) / total).astype(np.float32)
    return shares

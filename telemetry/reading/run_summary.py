"""A run in figures: per layer the last value of a statistic, its median, its trend, its alerts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING
from telemetry.reading.run_data import RunData
from telemetry.reading.sessions import Layer

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer.

    Attributes:
        name: In ``named_modules()``.
        type_name: Of its class.
        last: The latest value; may be NaN or infinite.
        median: Of the finite values; NaN if there is none.
        trend: Median of the last quarter of the values over that of the first; NaN if unknown.
        curve: The values over time in 16 characters.
        alert_count: Alerts that name it.
    """

    name: str
    type_name: str
    last: float
    median: float
    trend: float
    curve: str
    alert_count: int


def summarize(
    run: RunData, statistic: str, *, log: bool, most: int | None = None
) -> list[LayerSummary]:
    """The layers that have the statistic, in forward order.

    Args:
        run: What to read.
        statistic: Its name.
        log: Whether curves show magnitudes.
        most: Of more layers than that, those with alerts and the first ones.

    Raises:
        KeyError: There is no such statistic.
    """
    overview, matrix = run.overview(), run.matrix(statistic)
    alerts = Counter(alert.module_name for alert in overview.alerts)
    rows = np.flatnonzero((matrix.values != MISSING).any(axis=0)).tolist()
    by_importance = sorted(rows, key=lambda row: not alerts[overview.layers[row].name])
    return [
        _summarize(overview.layers[row], matrix.values[:, row], alerts, log=log)
        for row in sorted(by_importance[:most])
    ]


def _summarize(
    layer: Layer, curve: NDArray[np.float32], alerts: Counter[str | None], *, log: bool
) -> LayerSummary:
    values = curve[curve != MISSING].astype(np.float64)
    finite = values[np.isfinite(values)]
    return LayerSummary(
        name=layer.name,
        type_name=layer.type_name,
        last=float(values[-1]),
        median=float(np.median(finite)) if finite.size else math.nan,
        trend=_trend(finite),
        curve=spark(values, log=log),
        alert_count=alerts[layer.name],
    )


def spark(values: Sequence[float] | NDArray[np.float64], *, log: bool) -> str:
    """A curve of block characters; ``!`` is not finite, and with ``log`` a zero is blank."""
    array = np.asarray(values, dtype=np.float64)
    pieces = np.array_split(array, min(_SPARK_WIDTH, array.size))
    with np.errstate(divide="ignore", invalid="ignore"):
        heights = np.array([piece.max() for piece in pieces])
        heights = np.log10(heights) if log else heights
    drawable = heights[np.isfinite(heights)]
    low, span = (drawable.min(), np.ptp(drawable)) if drawable.size else (0.0, 0.0)
    return "".join(_block(height, float(low), float(span)) for height in heights)


def _block(height: float, low: float, span: float) -> str:
    if height == -math.inf:
        return " "
    if not math.isfinite(height):
        return "!"
    return _BLOCKS[int((height - low) / span * (len(_BLOCKS) - 1) + 0.5) if span else 0]


def _trend(finite: NDArray[np.float64]) -> float:
    quarter = finite.size // 4
    if not quarter:
        return math.nan
    first, last = np.median(finite[:quarter]), np.median(finite[-quarter:])
    return float(last / first) if first > 0 else math.nan

"""Sums up a run: last value, median, trend and curve of a statistic for each layer, and alerts."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING, Statistic
from telemetry.reading.run_data import RunData
from telemetry.reading.sessions import Layer
from telemetry.sparkline import sparkline

_CURVE_WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class LayerSummary:
    """One layer.

    Attributes:
        module_name: In ``named_modules()``.
        type_name: The name of its class.
        last: The latest value; may be NaN or infinite.
        median: Median of the finite values; NaN without any.
        trend: Median of the last quarter of the values over that of the first; NaN if unknown.
        curve: The values over time in 16 characters.
        alert_count: How many alerts name it.
    """

    module_name: str
    type_name: str
    last: float
    median: float
    trend: float
    curve: str
    alert_count: int


def summarize(run: RunData, statistic: Statistic) -> list[LayerSummary]:
    """The layers that have the statistic, which the page shows, in forward order."""
    layers, matrix = run.overview().layers, run.matrix(statistic.name)
    alerts = Counter(alert.module_name for alert in run.overview().alerts)
    return [
        _summarize(layers[row], matrix.values[:, row], alerts, log=statistic.log)
        for row in np.flatnonzero((matrix.values != MISSING).any(axis=0))
    ]


def _summarize(
    layer: Layer, curve: NDArray[np.float32], alerts: Counter[str | None], *, log: bool
) -> LayerSummary:
    values = curve[curve != MISSING].astype(np.float64)
    finite = values[np.isfinite(values)]
    return LayerSummary(
        module_name=layer.name,
        type_name=layer.type_name,
        last=float(values[-1]),
        median=float(np.median(finite)) if finite.size else math.nan,
        trend=_trend(finite),
        curve=sparkline(values, width=_CURVE_WIDTH, log=log),
        alert_count=alerts[layer.name],
    )


def _trend(finite: NDArray[np.float64]) -> float:
    quarter = finite.size // 4
    if not quarter:
        return math.nan
    first, last = np.median(finite[:quarter]), np.median(finite[-quarter:])
    return float(last / first) if first > 0 else math.nan

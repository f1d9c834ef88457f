"""Statistics of layers; :mod:`telemetry.layers.table` has one entry for each."""

from telemetry.layers.table import (
    MATRIX_STATISTICS,
    MISSING,
    PAGE_STATISTICS,
    PARAMETER_STATISTICS,
    RANK_STATISTICS,
    STATISTICS,
    LayerTable,
    Statistic,
    table,
)

__all__ = [
    "MATRIX_STATISTICS",
    "MISSING",
    "PAGE_STATISTICS",
    "PARAMETER_STATISTICS",
    "RANK_STATISTICS",
    "STATISTICS",
    "LayerTable",
    "Statistic",
    "table",
]

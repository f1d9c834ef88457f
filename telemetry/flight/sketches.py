"""Histograms in a flight file."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.sketch import Sketch

_FIGURES = (*EXTREMES, *POWER_SUMS)
_BUCKETS, _BUCKET_COUNTS = np.dtype("<i2"), np.dtype("<f4")


def encode(sketch: Sketch) -> dict[str, Any]:
    """The fields of a sketch for JSON: arrays as base64, NaN as null."""
    figures = {name: getattr(sketch, name) for name in _FIGURES}
    return {
        **{name: getattr(sketch, name) for name in COUNTS},
        **{name: float(v) if np.isfinite(v) else None for name, v in figures.items()},
        "buckets": base64.b64encode(sketch.buckets.astype(_BUCKETS).tobytes()).decode(),
        "counts": base64.b64encode(sketch.counts.astype(_BUCKET_COUNTS).tobytes()).decode(),
    }

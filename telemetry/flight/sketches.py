"""Histograms in a flight file, and back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from telemetry.moments import COUNTS, EXTREMES, POWER_SUMS
from telemetry.sketch import Sketch

_FIGURES = (*EXTREMES, *POWER_SUMS)
_BUCKETS, _BUCKET_COUNTS = np.dtype("<i2"), np.dtype("<f4")


def encode(sketch: Sketch) -> dict[str, Any]:
    """The fields of a sketch as JSON has them: arrays as base64, NaN as null."""
    figures = {name: getattr(sketch, name) for name in _FIGURES}
    return {
        **{name: getattr(sketch, name) for name in COUNTS},
        **{name: float(v) if np.isfinite(v) else None for name, v in figures.items()},
        "buckets": base64.b64encode(sketch.buckets.astype(_BUCKETS).tobytes()).decode(),
        "counts": base64.b64encode(sketch.counts.astype(_BUCKET_COUNTS).tobytes()).decode(),
    }


def decode(plain: dict[str, Any]) -> Sketch:
    """The sketch that :func:`encode` was given, its bucket counts rounded to float32.

    Sums that an older file does not have are NaN.
    """
    figures = {name: plain.get(name) for name in _FIGURES}
    fields: dict[str, Any] = {name: plain[name] for name in COUNTS}
    fields |= {name: np.nan if figure is None else figure for name, figure in figures.items()}
    return Sketch(
        **fields,
        buckets=np.frombuffer(base64.b64decode(plain["buckets"]), _BUCKETS).astype(np.int16),
        counts=np.frombuffer(base64.b64decode(plain["counts"]), _BUCKET_COUNTS).astype(np.float64),
    )

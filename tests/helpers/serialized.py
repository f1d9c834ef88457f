"""Values of events: parsed, and a single histogram."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
from numpy.typing import ArrayLike
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events import summaries


def summary_of(values: Iterable[bytes]) -> Summary:
    return Summary.FromString(b"".join(values))


def joined(batches: Iterable[Sequence[bytes]]) -> list[bytes]:
    """Values that are returned some at a time."""
    return list(chain.from_iterable(batches))


def histogram(tag: str, left: ArrayLike, right: ArrayLike, counts: ArrayLike) -> bytes:
    """Histogram with ``k`` buckets; ``k`` may be 0."""
    rows = np.array([left, right, counts], dtype=np.float64).T
    (value,) = summaries.histograms([tag], rows, [len(rows)])
    return value

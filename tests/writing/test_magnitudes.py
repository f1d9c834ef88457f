"""Histograms of log10 |x| hold every value that has a logarithm."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.sketch import sketch_array
from telemetry.writing.magnitudes import log10_histogram

VALUES = st.lists(st.floats(width=32), max_size=60).map(np.array)


@given(VALUES)
def test_each_value_lies_in_a_bucket_that_counts_it(values: np.ndarray) -> None:
    left, right, counts = log10_histogram(sketch_array(values))
    magnitudes = np.abs(values[np.isfinite(values)])
    magnitudes = magnitudes[magnitudes > 1.5e-39].astype(np.float32)
    assert counts.sum() >= magnitudes.size  # the rest is on the edge of the smallest bucket
    assert (right >= left).all()
    np.testing.assert_array_equal(left[1:], right[:-1])
    if magnitudes.size:
        logs = np.log10(magnitudes.astype(np.float64))
        assert left[0] <= logs.min() + 0.002  # half a bfloat16 unit
        assert right[-1] >= logs.max() - 0.002


def test_counts_are_those_of_the_magnitudes() -> None:
    left, right, counts = log10_histogram(sketch_array(np.array([-1.0, 1.0, 1e-3, 0.0, np.nan])))
    assert counts.sum() == 3
    assert counts[-1] == 2
    assert left[0] <= -3 <= right[0]


def test_without_magnitudes_there_is_no_histogram() -> None:
    for values in ([], [0.0, 0.0], [np.nan]):
        left, right, counts = log10_histogram(sketch_array(np.array(values)))
        assert left.size == right.size == counts.size == 0

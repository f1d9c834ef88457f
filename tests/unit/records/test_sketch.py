"""Buckets, moments, quantiles and merging of sketches, against NumPy in float64."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from telemetry.records.buckets import LAST_BUCKET, bucket_indices, edges
from telemetry.records.moments import POWER_SUMS
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch, sketch_array

EDGES = edges().astype(np.float64)

float32_arrays = arrays(np.float32, st.integers(0, 50), elements=st.floats(width=32))
moderate_arrays = arrays(
    np.float64, st.integers(1, 80), elements=st.floats(-1e6, 1e6, allow_subnormal=False)
)


def searched_buckets(finite: NDArray[np.floating]) -> NDArray[np.int64]:
    """Compare with the edges in the docstring, in float64."""
    values = finite.astype(np.float64)
    magnitude = np.searchsorted(EDGES, np.abs(values), side="right") - 1
    return np.copysign(np.minimum(magnitude, LAST_BUCKET), values).astype(np.int64)


def merged(*sketches: Sketch) -> Sketch:
    rows = Rows.of(sketches or [Sketch.empty()])
    return Sketch.of_row(rows.merged(np.zeros(len(rows), np.int64), 1), 0)


def scaled_sketch(x: NDArray[np.float64], factor: float) -> Sketch:
    return Sketch.of_row(Rows.of([sketch_array(x)]).scaled(np.array([factor])), 0)


def assert_same(actual: Sketch, expected: Sketch) -> None:
    for field in fields(Sketch):
        got, correct = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in POWER_SUMS:
            np.testing.assert_allclose(got, correct, rtol=1e-12, atol=1e-300, err_msg=field.name)
        else:
            np.testing.assert_array_equal(got, correct, err_msg=field.name)


# --- buckets -------------------------------------------------------------------------------------


def test_edges_ascend_eight_to_an_octave() -> None:
    assert edges().shape == (LAST_BUCKET + 2,)
    assert edges()[0] == 0
    assert np.all(np.diff(EDGES) > 0)
    normal = EDGES[9:]
    np.testing.assert_array_equal(normal[8:] / normal[:-8], 2)
    assert (normal[1:] / normal[:-1]).max() <= 1.125


def test_every_bfloat16_number_is_in_the_bucket_of_its_leading_bits() -> None:
    pattern = np.arange(1 << 16, dtype=np.uint32)
    x = (pattern << 16).view(np.float32)
    finite = np.isfinite(x)
    found = bucket_indices(x[finite])
    leading = ((pattern & 0x7FFF) >> 4).astype(np.int64)[finite]
    np.testing.assert_array_equal(np.abs(found), leading)
    np.testing.assert_array_equal(found, searched_buckets(x[finite]))


def test_random_float32_bits_and_ties_are_between_their_edges() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 300_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    x = np.concatenate([random, ties - 1, ties, ties + 1]).view(np.float32)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal(bucket_indices(x), searched_buckets(x))
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half)]
    np.testing.assert_array_equal(bucket_indices(half), searched_buckets(half))


def test_numbers_beyond_float32_are_in_the_outermost_buckets() -> None:
    sketch = sketch_array(np.array([1e300, -1e300, 1e-300, 0.0]))
    assert sketch.buckets.tolist() == [-LAST_BUCKET, 0, LAST_BUCKET]
    assert sketch.counts.tolist() == [1, 2, 1]
    assert (sketch.min, sketch.max, sketch.quantile(1)) == (-1e300, 1e300, 1e300)


# --- one array -----------------------------------------------------------------------------------


@given(float32_arrays)
def test_moments_and_counts_are_those_of_numpy(x: NDArray[np.float32]) -> None:
    sketch = sketch_array(x)
    wide = x.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    assert sketch.count == x.size
    assert sketch.finite_count == finite.size == sketch.counts.sum()
    assert sketch.nonfinite_count == x.size - finite.size
    assert sketch.nan_count == np.isnan(x).sum()
    assert sketch.positive_inf_count == np.isposinf(x).sum()
    assert sketch.negative_inf_count == np.isneginf(x).sum()
    assert sketch.zero_count == (x == 0).sum()
    np.testing.assert_equal(sketch.zero_fraction, np.mean(x == 0) if x.size else math.nan)
    if finite.size:
        assert (sketch.min, sketch.max) == (finite.min(), finite.max())
        np.testing.assert_allclose(sketch.mean, finite.mean(), rtol=1e-12)
        np.testing.assert_allclose(sketch.rms, np.sqrt(np.mean(finite**2)), rtol=1e-12)
        np.testing.assert_allclose(sketch.norm, np.linalg.norm(finite), rtol=1e-12)
        np.testing.assert_allclose(sketch.std, finite.std(), rtol=1e-6, atol=1e-7 * sketch.rms)


@pytest.mark.parametrize("x", [np.empty(0), np.full(3, np.nan)], ids=["empty", "all NaN"])
def test_without_finite_values_statistics_are_nan(x: NDArray[np.float64]) -> None:
    sketch = sketch_array(x)
    assert (sketch.finite_count, sketch.sum, sketch.norm) == (0, 0, 0)
    for value in (sketch.min, sketch.max, sketch.mean, sketch.rms, sketch.std):
        assert math.isnan(value)
    assert math.isnan(sketch.quantile(0.5))
    assert [part.size for part in sketch.histogram()] == [0, 0, 0]


@given(moderate_arrays, st.integers(-60, 60))
def test_kurtosis_is_the_fourth_standardized_moment(x: NDArray[np.float64], exponent: int) -> None:
    x[np.abs(x) < 1e-30] = 0
    sketch = sketch_array(x * 2.0**exponent)
    deviations = x - x.mean()
    if np.sqrt(np.mean(deviations**2)) > 0.01 * abs(x.mean()) > 0:
        expected = np.mean(deviations**4) / np.mean(deviations**2) ** 2
        np.testing.assert_allclose(sketch.kurtosis, expected, rtol=1e-6)


@pytest.mark.parametrize("x", [[], [2.0, 2.0], [1e4, 1e4 + 1], [np.nan]], ids=str)
def test_kurtosis_that_rounding_would_make_up_is_nan(x: list[float]) -> None:
    assert math.isnan(sketch_array(np.array(x)).kurtosis)


def test_sums_of_higher_powers_may_be_unknown() -> None:
    known = sketch_array(np.array([1.0, 2.0, 4.0]))
    unknown = replace(known, sum_cubes=math.nan, sum_fourth_powers=math.nan)
    both = merged(known, unknown)
    assert (both.mean, both.std) == (known.mean, known.std)
    assert math.isnan(both.kurtosis)


def test_sums_beyond_float64_are_infinite_and_raise_nothing() -> None:
    huge = sketch_array(np.array([1.7e308]))
    assert merged(huge, huge).sum == math.inf
    sketch = sketch_array(np.array([1e200, -1e200]))
    assert (sketch.sum_squares, sketch.rms) == (math.inf, math.inf)
    assert not sketch.std < math.inf


@pytest.mark.parametrize("dtype", ["?", "i1", "u1", "i8", "u8", "f2", "f4", "f8", "c8"])
def test_numeric_dtypes_count_by_value_and_others_are_refused(dtype: str) -> None:
    """Complex numbers count by their absolute value."""
    array = np.array([0, 1, 1], dtype) * (1j if dtype == "c8" else 1)
    assert_same(sketch_array(array), sketch_array(np.array([0.0, 1.0, 1.0])))
    with pytest.raises(TypeError, match="dtype object"):
        sketch_array(np.array([None]))


# --- quantiles -----------------------------------------------------------------------------------


@given(moderate_arrays, st.floats(0, 1))
def test_quantile_is_in_the_bucket_of_the_exact_one(x: NDArray[np.float64], q: float) -> None:
    sketch = sketch_array(x)
    with pytest.raises(ValueError, match="between 0 and 1"):
        sketch.quantile(-0.1 - q)
    exact = np.sort(x)[max(math.ceil(q * x.size) - 1, 0)]
    found = sketch.quantile(q)
    assert sketch.min <= sketch.quantile(q / 2) <= found <= sketch.max
    # A limit belongs to the next bucket, and float32 rounding moves the float64 values.
    assert abs(found - exact) <= 0.126 * abs(exact) + 2e-38


# --- merging -------------------------------------------------------------------------------------


@given(moderate_arrays, st.integers(-20, 20))
def test_scaling_by_a_power_of_two_is_exact(x: NDArray[np.float64], exponent: int) -> None:
    x[np.abs(x) < 1e-30] = 0
    factor = 2.0**exponent
    assert_same(scaled_sketch(x, factor), sketch_array(x * factor))


@given(moderate_arrays, st.floats(1e-6, 1e6))
def test_scaling_by_any_factor_is_off_by_half_a_bucket(
    x: NDArray[np.float64], factor: float
) -> None:
    x[np.abs(x) < 1e-30] = 0
    scaled, exact = scaled_sketch(x, factor), sketch_array(x * factor)
    assert (scaled.count, scaled.zero_count) == (exact.count, exact.zero_count)
    np.testing.assert_allclose(scaled.counts.sum(), scaled.finite_count)
    np.testing.assert_allclose([scaled.min, scaled.max], [exact.min, exact.max])
    np.testing.assert_allclose(scaled.norm, exact.norm)
    for q in (0.1, 0.5, 0.9):
        np.testing.assert_allclose(scaled.quantile(q), exact.quantile(q), rtol=0.26, atol=1e-37)


# --- histogram -----------------------------------------------------------------------------------


@given(float32_arrays)
def test_histogram_is_contiguous_and_counts_every_finite_value(x: NDArray[np.float32]) -> None:
    sketch = sketch_array(x)
    left, right, counts = sketch.histogram()
    assert counts.sum() == sketch.finite_count
    np.testing.assert_array_equal(left[1:], right[:-1])
    assert np.all(left <= right)
    if counts.size:
        assert (left[0], right[-1]) == (sketch.min, sketch.max)


def test_histogram_drops_to_zero_once_in_each_gap() -> None:
    left, right, counts = sketch_array(np.array([-1.0, 1.0, 1.1, 8.0])).histogram()
    assert counts.tolist() == [1, 0, 2, 0, 1] or counts.tolist() == [1, 0, 1, 1, 0, 1]
    assert left[1] == -right[1]
    assert np.all(right > left)
    left, right, counts = sketch_array(np.full(7, 3.0)).histogram()  # a bucket without width
    assert (left.tolist(), right.tolist(), counts.tolist()) == ([3], [3], [7])

"""Histograms of several steps over shared bins."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from telemetry.reading.distributions import BINS, Distribution, distribution, histogram_table
from telemetry.records.sketch import sketch_array


def point(values: np.ndarray, step: int = 0) -> tuple[int, np.ndarray]:
    return step, histogram_table(np.stack(sketch_array(values).histogram(), axis=1))


def of(*points: tuple[int, np.ndarray]) -> Distribution:
    of_points = distribution(points)
    assert of_points is not None
    return of_points


@pytest.mark.slow
@given(st.lists(st.lists(st.floats(-1e30, 1e30), min_size=1), min_size=1, max_size=4))
@example(steps=[[0.0, 1e-38]])
@example(steps=[[0.0, -1.1e-38], [5e-39]])
def test_shares_of_each_step_add_up_to_one(steps: list[list[float]]) -> None:
    found = of(*(point(np.array(values), step) for step, values in enumerate(steps)))
    np.testing.assert_allclose(found.shares.sum(axis=1), 1, rtol=1e-4)
    assert (found.shares >= -1e-6).all()
    assert (np.diff(found.edges) > 0).all()


def test_shares_of_bins_are_close_to_those_of_numpy() -> None:
    values = np.random.default_rng(0).normal(0, 1, 100_000)
    found = of(point(values))
    below = found.shares[0][found.edges[1:] <= 0].sum()
    assert below == pytest.approx(0.5, abs=0.03)
    expected = np.histogram(values, found.edges)[0] / values.size
    np.testing.assert_allclose(found.shares[0][1:-1], expected[1:-1], atol=0.006)


def test_a_step_without_values_is_a_gap_and_equal_values_are_in_one_bin() -> None:
    found = of(point(np.array([1.0, 2.0])), point(np.array([np.nan]), 1))
    assert found.shares[1].sum() == 0
    assert distribution([]) is None
    assert distribution([point(np.array([np.nan]))]) is None
    assert of(point(np.zeros(5))).shares.max() == pytest.approx(1)


def test_zeros_have_a_separate_bin() -> None:
    random = np.random.default_rng(0)
    rectified = np.maximum(random.normal(0, 1, 10_000), 0)
    sparse = np.where(random.random(10_000) < 0.9, 0, random.normal(0, 1e-3, 10_000))
    for values in (rectified, sparse, -rectified, np.append(rectified, -5)):
        found = of(point(values), point(values[values != 0], 1))
        assert found.zero_bin is not None
        share = (values == 0).mean()
        np.testing.assert_allclose(found.shares[:, found.zero_bin], [share, 0], rtol=1e-4)
        low, high = found.edges[found.zero_bin : found.zero_bin + 2]
        assert -1e-38 < low < 0 < high < 1e-38
        assert len(found.edges) - 2 == pytest.approx(BINS, abs=1)
        others = np.abs(values[values != 0])
        assert np.median(others) / 3 < found.unit < 3 * np.median(others)
    found = of(point(np.ones(5)))
    assert found.zero_bin is None


numbers = st.floats(width=64) | st.sampled_from([-1.7e308, 1.7e308, 5e-324, 0.0, 1.0])


@example([[(0.0, 3.99e292, 1e-20)]])
@given(st.lists(st.lists(st.tuples(numbers, numbers, numbers), max_size=4), max_size=3))
@pytest.mark.filterwarnings("error")
def test_any_table_is_refused_or_has_finite_edges_and_shares(
    steps: list[list[tuple[float, float, float]]],
) -> None:
    tables = []
    for step, rows in enumerate(steps):
        try:
            tables.append((step, histogram_table(np.array(rows).reshape(-1, 3))))
        except ValueError:
            continue
    found = distribution(tables)
    if found is not None:
        assert np.isfinite(found.edges).all()
        assert np.isfinite(found.shares).all()


@pytest.mark.parametrize(
    "value",
    [b"text", np.zeros(3), np.zeros((2, 2)), np.array([[2, 1, 1]]), np.array([[0, 1, np.nan]])],
)
def test_an_invalid_histogram_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="histogram"):
        histogram_table(value)

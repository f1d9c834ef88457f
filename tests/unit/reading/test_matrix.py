"""Downsampled matrices keep their largest and their non-finite values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from telemetry.reading.matrix import Matrix, Region, in_order, thin

VALUES = hnp.arrays(
    np.float32,
    st.tuples(st.integers(0, 30), st.integers(1, 30)),
    elements=st.sampled_from([-1.0, 0.0, 1.0, 2.5, np.inf, np.nan]),
)


def matrix_of(values: np.ndarray) -> Matrix:
    return Matrix(steps=np.arange(len(values)) * 10, values=values)


@given(VALUES, st.integers(1, 40), st.integers(1, 900))
def test_each_cell_shows_the_worst_of_its_values(
    values: np.ndarray, max_layers: int, max_cells: int
) -> None:
    thinned = thin(matrix_of(values), max_layers=max_layers, max_cells=max_cells)
    rows, columns = thinned.layer_factor, thinned.step_factor
    assert thinned.values.shape[1] <= max_layers
    assert thinned.values.size <= max(max_cells, thinned.values.shape[1])
    assert thinned.steps.tolist() == list(range(0, 10 * len(values), 10 * columns))
    for (i, j), cell in np.ndenumerate(thinned.values):
        block = values[i * columns : (i + 1) * columns, j * rows : (j + 1) * rows]
        np.testing.assert_equal(cell, block.max())  # NumPy's maximum is NaN if there is one


def test_a_matrix_that_fits_is_unchanged() -> None:
    matrix = matrix_of(np.ones((4, 5), np.float32))
    assert thin(matrix, max_layers=5, max_cells=20) is matrix


def test_a_region_includes_both_of_its_ends() -> None:
    steps = np.array([0, 5, 10, 15])
    region = Region(first_step=5, last_step=10, first_layer=2, last_layer=3)
    assert region.holds(steps).tolist() == [False, True, True, False]
    assert list(range(10))[region.layers(10)] == [2, 3]
    assert Region().holds(steps).all()
    assert list(range(3))[Region(last_layer=99).layers(3)] == [0, 1, 2]
    assert list(range(3))[Region(first_layer=7).layers(3)] == []


def test_decreasing_steps_are_sorted() -> None:
    steps, values = np.array([0, 2, 1, 2, 5]), np.arange(5, dtype=np.float32)
    ordered, kept = in_order(steps, values)
    assert ordered.tolist() == [0, 1, 2, 5]
    assert kept.tolist() == [0, 2, 3, 4]  # the last of equal steps
    assert in_order(ordered, kept)[0] is ordered

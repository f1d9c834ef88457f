"""Rows of tensors equal the oracle, and merging equals measuring everything at once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from telemetry import Sketch, TensorRecord
from telemetry.measure import Measurements
from telemetry.records.rows import HEAD, PAIR, UNIT, Rows
from telemetry.records.sketch import sketch_array
from tests.helpers.moments_close import assert_moments_close

Floats = NDArray[np.float32]
Floats32 = arrays(np.float32, st.integers(0, 30), elements=st.floats(width=32))


def rows_of(values: list[Floats]) -> Rows:
    return Rows.of([sketch_array(one) for one in values])


def sketch_of(rows: Rows, row: int) -> Sketch:
    return TensorRecord.of_row(rows, row).sketch


def assert_rows_are(rows: Rows, values: list[Floats]) -> None:
    assert len(rows) == len(values)
    for row, one in enumerate(values):
        found, expected = sketch_of(rows, row), sketch_array(one)
        assert_moments_close(found, expected, rtol=1e-12)
        np.testing.assert_array_equal(found.buckets, expected.buckets)
        np.testing.assert_array_equal(found.counts, expected.counts)


@pytest.mark.slow
@given(st.lists(Floats32, max_size=5))
def test_encoded_rows_are_decoded(values: list[Floats]) -> None:
    heads, pairs, units = rows_of(values).encode()
    assert_rows_are(Rows.decode(bytearray(heads), bytearray(pairs), bytearray(units)), values)


@pytest.mark.slow
@given(st.lists(Floats32, min_size=1, max_size=6), st.data())
def test_merging_equals_measuring_everything_at_once(
    values: list[Floats], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(values)))
    others = data.draw(
        st.lists(
            st.integers(-1, size - 1), min_size=len(values) - size, max_size=len(values) - size
        )
    )
    targets = np.array(data.draw(st.permutations([*range(size), *others])), np.int64)
    merged = rows_of(values).merged(targets, size)
    parts = [[v for v, at in zip(values, targets, strict=True) if at == p] for p in range(size)]
    assert_rows_are(merged, [np.concatenate(one) for one in parts])
    assert merged.calls.tolist() == [len(one) for one in parts]


@pytest.mark.slow
@given(st.lists(Floats32, min_size=1, max_size=5), st.data())
def test_rows_are_taken_and_joined_in_the_given_order(
    values: list[Floats], data: st.DataObject
) -> None:
    rows = rows_of(values)
    order = data.draw(st.lists(st.integers(0, len(values) - 1)))
    assert_rows_are(rows.take(np.array(order, np.intp)), [values[i] for i in order])
    assert_rows_are(Rows.concatenate([rows, rows]), values + values)


def with_units(*units: Floats) -> Rows:
    """Return rows of tensors ``[elements, units]``."""
    extremes = [np.stack([one.min(axis=0), one.max(axis=0)], axis=1) for one in units]
    return Rows.of([sketch_array(one) for one in units], units=extremes)


def test_units_are_merged_if_equally_many_and_keep_their_nan() -> None:
    a = np.array([[1, np.nan, 0]], np.float32)
    b = np.array([[-2, 5, 0]], np.float32)
    merged = with_units(a, b).merged(np.zeros(2, np.int64), 1)
    np.testing.assert_array_equal(merged.units, [[-2, 1], [np.nan, np.nan], [0, 0]])
    assert merged.dead_fraction == pytest.approx([1 / 3])
    assert with_units(a, b[:, :2]).merged(np.zeros(2, np.int64), 1).units_of(0) is None


def test_variation_is_the_smaller_of_deviation_and_half_of_the_ranges_of_units() -> None:
    random = np.random.default_rng(0)
    same = np.tile(random.normal(size=4).astype(np.float32), (9, 1))  # for each input
    other = random.normal(size=(9, 4)).astype(np.float32)
    apart = other + np.float32([-30, -10, 10, 30])
    rows = with_units(same, other, apart)
    ranges = np.ptp(apart.astype(np.float64), axis=0)
    within = np.sqrt((ranges**2).mean()) / 2
    assert other.std() < within < apart.std()
    np.testing.assert_allclose(rows.variation, [0, other.std(dtype=np.float64), within], rtol=1e-5)


def test_counters_do_not_wrap_at_2_to_the_32() -> None:
    size = 1 << 17
    indices = torch.tensor([[1], [2]])
    measurements = Measurements()
    measurements.add(
        torch.sparse_coo_tensor(indices, torch.ones(1), (size, size), check_invariants=True)
    )
    (record,) = measurements.finish().reduce().values()
    assert record.sketch.counts.tolist() == [size * size - 1, 1]
    # Many rows of one tensor.
    head, pair = np.zeros(2, HEAD), np.zeros(2, PAIR)
    head["count"], head["sampled"], head["bucket_count"] = 2**32 - 1, -1, 1
    head["min"] = head["max"] = 1
    pair["bucket"], pair["count"] = 1016, 2**32 - 1
    units = np.empty(0, UNIT)
    rows = Rows.decode(*(bytearray(part.tobytes()) for part in (head, pair, units)))
    assert rows.merged(np.zeros(2, np.int64), 1).counts.tolist() == [2 * (2**32 - 1)]

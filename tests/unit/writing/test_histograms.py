"""Histograms of many tensors are those of each; those of log10 |x| hold each value.

Pictures of a step have a limit, and take turns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tensorboard.util.tensor_util import make_ndarray
from torch import nn

from telemetry import HookLogger
from telemetry.reading.distributions import _quantiles
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch, sketch_array
from telemetry.writing.histograms import (
    Tagged,
    histogram_values,
    histograms,
    log10_histogram_values,
)
from tests.helpers.serialized import joined, summary_of
from tests.helpers.tiny_run import event_files, events_of
from tests.helpers.twins import descend

RANDOM = np.random.default_rng(0)


def tagged(sketches: Mapping[str, Sketch]) -> Tagged:
    return list(sketches), Rows.of(list(sketches.values()))


@pytest.mark.slow
def test_pictures_alternate_and_a_large_one_is_reduced(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Conv2d(3, 40, 3, padding=1), *[nn.Conv2d(40, 40, 3)] * 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: Any = {"every_n_steps": 1, "alerts": (), "max_overhead": math.inf}
    with HookLogger(model, tmp_path, **options) as logger:
        for _ in range(8):
            descend(model, torch.rand(1, 3, 100, 100), optimizer)
            with logger.phase("sample"), torch.no_grad():
                model(torch.rand(1, 3, 100, 100))
    [path] = event_files(tmp_path)
    pixels, tags = Counter[tuple[bool, int]](), Counter[str]()
    for event in events_of(path):
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "images" and "~~" in value.tag:
                width, height = map(int, value.tensor.string_val[:2])
                pixels["sample" in value.tag, event.step] += width * height
                tags[value.tag] += 1
    assert sorted(pixels) == [(of, step + of) for of in (False, True) for step in range(8)]
    assert 40_000 < min(pixels.values()) <= max(pixels.values()) <= 1 << 17
    for of_phase in (True, False):
        found = {tag: count for tag, count in tags.items() if ("sample" in tag) == of_phase}
        assert {tag.rpartition("/")[2] for tag in found} <= {"input", "~~input", "0000.0", "0001.1"}
        assert max(found.values()) - min(found.values()) <= 1


VALUES = st.lists(st.floats(width=32), max_size=60).map(np.array)
WIDE_VALUES = st.lists(st.floats(width=32) | st.floats(), max_size=60).map(np.array)
SAMPLED = st.sampled_from([1.0, 10.58, 2.0**24 + 1])


def written(values: Sequence[bytes]) -> dict[str, NDArray[np.generic]]:
    return {value.tag: make_ndarray(value.tensor) for value in summary_of(values).value}


def sketch_of(values: NDArray[np.float64], scale: float = 1.0) -> Sketch:
    sketch = sketch_array(values)
    return replace(sketch, counts=sketch.counts * scale)


# A boundary of buckets that a sum over all rows moves by its rounding.
AT_BOUNDARY = np.array([0.0] * 22 + [1.0, 1469370496.0, 0.015625])


@pytest.mark.slow
@example([(np.array([0.0]), 2.0**24 + 1), (AT_BOUNDARY, 10.58)])
@given(st.lists(st.tuples(WIDE_VALUES, SAMPLED), max_size=5))
def test_many_histograms_equal_those_of_each_tensor(
    tensors: list[tuple[NDArray[np.float64], float]],
) -> None:
    sketches = {str(i): sketch_of(*tensor) for i, tensor in enumerate(tensors)}
    found = written(joined(histogram_values(*tagged(sketches))))
    assert list(found) == list(sketches)
    for tag, sketch in sketches.items():
        [alone] = written(joined(histogram_values([tag], Rows.of([sketch])))).values()
        assert np.isfinite(alone).all()
        assert alone[:, 2].sum(dtype=np.float64) == pytest.approx(sketch.counts.sum())
        np.testing.assert_array_equal(found[tag], alone)


def test_two_histograms_have_no_gap_between_them() -> None:
    sketches = {str(i): sketch_array(np.array([i])) for i in (-1.0, 1.0)}
    found = written(joined(histogram_values(*tagged(sketches))))
    assert {tag: rows.tolist() for tag, rows in found.items()} == {
        "-1.0": [[-1.0, -1.0, 1.0]],
        "1.0": [[1.0, 1.0, 1.0]],
    }


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_each_value_lies_in_a_bucket_that_counts_it(tensors: list[NDArray[np.float64]]) -> None:
    sketches = {str(i): sketch_array(values) for i, values in enumerate(tensors)}
    found = written(joined(log10_histogram_values(*tagged(sketches))))
    for tag, values in zip(sketches, tensors, strict=True):
        magnitudes = np.abs(values[np.isfinite(values)])
        magnitudes = magnitudes[magnitudes > 1.5e-39].astype(np.float32)
        if tag not in found:
            assert not magnitudes.size
            continue
        left, right, counts = found[tag].T
        assert counts.sum() >= magnitudes.size  # the rest is on the edge of the smallest bucket
        assert (right >= left).all()
        np.testing.assert_array_equal(left[1:], right[:-1])
        if magnitudes.size:
            logs = np.log10(magnitudes.astype(np.float64))
            assert left[0] <= logs.min() + 0.002  # half a bfloat16 unit
            assert right[-1] >= logs.max() - 0.002


@given(st.lists(VALUES, min_size=1, max_size=4))
def test_many_magnitudes_equal_those_of_each_tensor(tensors: list[NDArray[np.float64]]) -> None:
    sketches = {str(i): sketch_array(values) for i, values in enumerate(tensors)}
    together = joined(log10_histogram_values(*tagged(sketches)))
    alone = [
        v for t, s in sketches.items() for v in joined(log10_histogram_values([t], Rows.of([s])))
    ]
    assert together == alone


@pytest.mark.slow
@example([np.array([-1.0, 1.0])])
@given(st.lists(WIDE_VALUES, min_size=1, max_size=4))
def test_buckets_have_the_sums_of_the_measured_ones(tensors: list[NDArray[np.float64]]) -> None:
    sketches = {str(i): sketch_of(values) for i, values in enumerate(tensors)}
    for tag, rows in written(joined(histogram_values(*tagged(sketches)))).items():
        fine = np.stack(sketches[tag].histogram(), axis=1)
        left, right, counts = rows.astype(np.float64).T
        np.testing.assert_array_equal(left[1:], right[:-1])
        assert (left <= right).all()
        ends = np.minimum(fine[:, 1], np.finfo(np.float32).max).astype(np.float32)
        indices = np.searchsorted(right, ends)  # the row whose right edge is not below
        np.testing.assert_array_equal(
            counts, np.bincount(indices, fine[:, 2], minlength=len(right))
        )
        assert np.count_nonzero(counts) <= 42
        assert len(rows) <= len(fine)


@pytest.mark.parametrize("size", [31, 500, 20_000])
@pytest.mark.parametrize("freedom", [3, 1000])
def test_buckets_have_a_few_values_or_are_narrow(size: int, freedom: int) -> None:
    values = np.append(RANDOM.standard_t(freedom, size=size), np.zeros(size // 10))
    sketch = sketch_array(values)
    fine, (rows, _) = np.stack(sketch.histogram(), axis=1), histograms(Rows.of([sketch]))
    left, right, counts = rows.astype(np.float64).T
    assert counts.sum() == values.size
    assert (left[0], right[-1]) == (np.float32(values.min()), np.float32(values.max()))
    assert counts[np.maximum(-left, right) < 1e-30] == [size // 10], "zeros stay alone"
    within = np.array([((fine[:, 0] >= a) & (fine[:, 1] <= b)).sum() for a, b, _ in rows])
    is_joined = within > 1
    share = counts / values.size + (right - left) / (right[-1] - left[0])
    # Twice a fortieth, and the halves of the two measured buckets at its ends.
    assert share[is_joined].max(initial=0) < 2 / 40 + 2 * share[~is_joined].max(initial=1 / 40)
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    found, exact = _quantiles(rows.astype(np.float64), shares), _quantiles(fine, shares)
    np.testing.assert_allclose(found, exact, atol=0.03 * values.std(), rtol=0.06)

"""Histograms and pictures of a step stay within the byte limit, and tags alternate.

Histograms of many tensors are those of each; of log10 |x|, they hold each value with one."""

from __future__ import annotations

import math
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
from telemetry.writing.size_budget import (
    Tagged,
    histogram_values,
    histograms,
    joined_widths,
    log10_histogram_values,
)
from tests.helpers.serialized import joined, summary_of
from tests.helpers.tiny_run import event_files, events_of

RANDOM = np.random.default_rng(0)


def tagged(sketches: Mapping[str, Sketch]) -> Tagged:
    return list(sketches), Rows.of(list(sketches.values()))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["tensor", "classic"])
def test_a_step_never_exceeds_the_budget_and_its_histograms_alternate(
    tmp_path: Path, form: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Magnitudes are omitted first, which is logged once; each other tensor has its turn."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(30, 30) for _ in range(40)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = {"alerts": (), "images": False, "histograms": form, "max_overhead": math.inf}
    with HookLogger(model, tmp_path, every_n_steps=1, max_bytes_per_step=30_000, **options):
        for _ in range(12):
            model(torch.randn(64, 30)).square().mean().backward()
            optimizer.step()
    [path] = event_files(tmp_path)
    sizes, tags = dict.fromkeys(range(12), 0), dict[int, list[str]]()
    for event in events_of(path):
        for value in event.summary.value:
            if value.tag.startswith("~tensors/"):
                sizes[event.step] += value.ByteSize()
                tags.setdefault(event.step, []).append(value.tag)
    assert 20_000 < max(sizes.values()) <= 30_000
    assert len({tag for some in tags.values() for tag in some}) == 40 * 2 * 2 + 40 * 2
    assert min(map(len, tags.values())) < 240
    assert not any("log10" in tag for some in tags.values() for tag in some)
    [message] = [message for message in caplog.messages if "max_bytes_per_step=" in message]
    assert "are omitted" in message


@pytest.mark.slow
def test_pictures_alternate_and_a_large_one_is_reduced(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Conv2d(3, 3, 3, padding=1) for _ in range(6)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sizes = {}
    for limit in (60_000, None):
        log_dir = tmp_path / str(limit)
        options = {"alerts": (), "max_bytes_per_step": limit, "max_overhead": math.inf}
        with HookLogger(model, log_dir, every_n_steps=1, **options):
            for _ in range(8):
                model(torch.rand(4, 3, 300, 300)).square().mean().backward()
                optimizer.step()
        [path] = event_files(log_dir)
        events = [e for e in events_of(path) if e.summary.value]
        pictures = {
            (event.step, value.tag): int(value.tensor.string_val[0])
            for event in events
            for value in event.summary.value
            if value.metadata.plugin_data.plugin_name == "images"
            and value.tag.startswith("~tensors/")
        }
        sizes[limit] = pictures
    assert {tag for _, tag in sizes[60_000]} == {tag for _, tag in sizes[None]}
    assert len(sizes[60_000]) < len(sizes[None])
    assert any(width < sizes[None][key] for key, width in sizes[60_000].items())


VALUES = st.lists(st.floats(width=32), max_size=60).map(np.array)
WIDE_VALUES = st.lists(st.floats(width=32) | st.floats(), max_size=60).map(np.array)
SAMPLED = st.sampled_from([1.0, 10.58, 2.0**24 + 1])


def written(values: Sequence[bytes]) -> dict[str, NDArray[np.generic]]:
    return {value.tag: make_ndarray(value.tensor) for value in summary_of(values).value}


def sketch_of(values: NDArray[np.float64], scale: float = 1.0) -> Sketch:
    sketch = sketch_array(values)
    return replace(sketch, counts=sketch.counts * scale)


@pytest.mark.slow
@given(st.lists(st.tuples(WIDE_VALUES, SAMPLED), max_size=5))
def test_many_histograms_equal_those_of_each_tensor(
    tensors: list[tuple[NDArray[np.float64], float]],
) -> None:
    sketches = {str(i): sketch_of(*tensor) for i, tensor in enumerate(tensors)}
    found = written(joined(histogram_values(*tagged(sketches))))
    assert list(found) == list(sketches)
    for tag, sketch in sketches.items():
        rows = np.stack(sketch.histogram(), axis=1)
        if (joined_widths(Rows.of([sketch])) > 1).any():
            [alone] = written(joined(histogram_values([tag], Rows.of([sketch])))).values()
            np.testing.assert_array_equal(found[tag], alone)
            continue
        beyond_float32 = np.abs(rows[:, :2]).max(initial=0) > np.finfo(np.float32).max
        lossy = (rows[:, 2] % 1 == 0) & (rows[:, 2].astype(np.float32) != rows[:, 2])
        assert found[tag].dtype == (np.float64 if beyond_float32 or lossy.any() else np.float32)
        np.testing.assert_array_equal(found[tag], rows.astype(found[tag].dtype))


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
@example([np.array([-1.0, 1.0])], 8)
@given(st.lists(WIDE_VALUES, min_size=1, max_size=4), st.sampled_from([1, 2, 8, 32]))
def test_merged_buckets_have_the_sums_of_the_fine_ones(
    tensors: list[NDArray[np.float64]], merged: int
) -> None:
    sketches = {str(i): sketch_of(values) for i, values in enumerate(tensors)}
    for tag, rows in written(joined(histogram_values(*tagged(sketches), merged=merged))).items():
        fine = np.stack(sketches[tag].histogram(), axis=1)
        left, right, counts = rows.astype(np.float64).T
        np.testing.assert_array_equal(left[1:], right[:-1])
        assert (left <= right).all()
        ends = fine[:, 1].astype(rows.dtype)
        indices = np.searchsorted(right, ends)  # the row whose right edge is not below
        np.testing.assert_array_equal(
            counts, np.bincount(indices, fine[:, 2], minlength=len(right))
        )
        buckets = sketches[tag].buckets.tolist()
        groups = {(b > 0, -(-abs(b) // merged)) for b in buckets}  # sign and size
        assert np.count_nonzero(counts) <= len(groups)
        assert len(rows) <= len(fine)


@pytest.mark.parametrize("size", [31, 500, 20_000])
def test_joined_buckets_have_few_values_and_are_narrow(size: int) -> None:
    values = RANDOM.standard_t(3, size=size)
    sketch = sketch_array(values)
    fine, (rows, _) = np.stack(sketch.histogram(), axis=1), histograms(Rows.of([sketch]))
    left, right, counts = rows.astype(np.float64).T
    assert counts.sum() == size
    assert (left[0], right[-1]) == (np.float32(values.min()), np.float32(values.max()))
    is_joined = ~np.isin(left, fine[:, 0].astype(np.float32)) | ~np.isin(
        right, fine[:, 1].astype(np.float32)
    )
    within = np.array([((fine[:, 0] >= a) & (fine[:, 1] <= b)).sum() for a, b, _ in rows])
    is_joined |= within > 1
    assert counts[is_joined].max(initial=0) <= size / 32
    rms, ratio = np.sqrt((values**2).mean()), np.maximum(right / left, left / right)
    is_narrow = (right - left <= rms / 16) | ((left * right > 0) & (ratio < 2**0.26 * 1.07))
    assert (is_narrow | ~is_joined | (counts == 0)).all()
    # A tensor of few values stays as it is, and one of many has half of the rows.
    assert len(rows) == len(fine) if size == 31 else len(rows) < 0.7 * len(fine)
    shares = [0.05, 0.25, 0.5, 0.75, 0.95]
    found, exact = _quantiles(rows.astype(np.float64), shares), _quantiles(fine, shares)
    np.testing.assert_allclose(found, exact, atol=0.02 * rms, rtol=0.06)

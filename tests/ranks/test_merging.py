"""Merging parts of tensors equals measuring the whole, in whatever order."""

from __future__ import annotations

import math
import os
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from moments_close import assert_moments_close
from numpy.typing import NDArray

from telemetry.ranks.columns import NO_ROWS, Table
from telemetry.ranks.held import Share
from telemetry.ranks.measured import (
    Check,
    Measured,
    MeasuredParameters,
    Row,
    merge,
    tensors_of,
)
from telemetry.ranks.messages import FORMAT, Message, decode, encode
from telemetry.ranks.whole import WholeRecords, differing, whole_tensors
from telemetry.records import Layout, Module, Parameter, Spread, TensorRecord
from telemetry.records.sketch import sketch_array

ROW = Row(0, "weights", "layer.weight")
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)
SHARDS = st.lists(arrays(np.float32, st.integers(0, 20), elements=VALUES), min_size=1, max_size=6)


def record_of(values: NDArray[Any], **units: Any) -> TensorRecord:
    return TensorRecord(sketch=sketch_array(values), **units)


def table(rank: int, values: NDArray[Any], **share: Any) -> Table:
    return tensors_of(rank, {ROW: Share(**share)}, record_of(values).rows)


@given(shards=SHARDS, data=st.data())
def test_shards_add_up_in_any_grouping_and_other_copies_do_not_count(
    shards: list[NDArray[np.float32]], data: st.DataObject
) -> None:
    count = len(shards)
    tables = [table(rank, shard) for rank, shard in enumerate(shards)]
    tables += [table(count + rank, shard, copy=1) for rank, shard in enumerate(shards)]
    while len(tables) > 1:
        tables = data.draw(st.permutations(tables))
        size = data.draw(st.integers(2, len(tables)))
        tables = [Table.merge_all(tables[:size]), *tables[size:]]
    whole = sketch_array(np.concatenate(shards))
    got = whole_tensors(tables[0])[ROW].sketch
    assert_moments_close(got, whole, rtol=1e-13)
    np.testing.assert_array_equal(got.buckets, whole.buckets)
    np.testing.assert_array_equal(got.counts, whole.counts)


@given(norms=st.lists(st.floats(0, 1e300), min_size=2, max_size=6), data=st.data())
def test_norms_of_shards_merge_without_overflow(norms: list[float], data: st.DataObject) -> None:
    parts = [part(rank, norm) for rank, norm in enumerate(norms)]
    while len(parts) > 1:
        parts = data.draw(st.permutations(parts))
        parts = [merge(parts[:2]), *parts[2:]]
    (norm,) = parts[0].stages[0, "a"].grads["norm"]
    assert norm == pytest.approx(math.hypot(*norms), rel=1e-14)


def test_nan_of_one_shard_is_not_hidden_by_infinity_of_another() -> None:
    record = WholeRecords().record(merge([part(0, math.inf), part(1, math.nan)]))
    assert record is not None
    assert math.isnan(record.total_grad_norm)


def test_units_that_are_spread_over_ranks_are_put_together() -> None:
    low = np.array([1, 2], np.float32)
    pieces = [
        tensors_of(
            rank,
            {ROW: Share(piece=rank % 2, pieces=2)},
            record_of(low, unit_min=low - rank, unit_max=low + rank).rows,
        )
        for rank in range(4)
    ]
    record = whole_tensors(Table.merge_all(pieces))[ROW]
    np.testing.assert_array_equal(record.unit_min, [-1, 0, -2, -1])
    np.testing.assert_array_equal(record.unit_max, [3, 4, 4, 5])
    incomplete = whole_tensors(Table.merge_all(pieces[::2]))[ROW]
    assert incomplete.unit_min is None


def test_what_was_logged_is_the_mean_over_the_ranks_that_logged_it() -> None:
    logged = [(0, {"loss": 1.0}), (2, {"loss": 4.0}), (1, {"other": 7.0}), (3, {"none": math.nan})]
    merged = Table.merge_all([Table.of_figures(rank, figures) for rank, figures in logged])
    assert merged.means() == {
        "loss": 2.5,
        "other": 7.0,
        "none": pytest.approx(math.nan, nan_ok=True),
    }
    assert merged.spreads() == {
        "loss": Spread(low=1.0, low_rank=0, high=4.0, high_rank=2),
        "other": Spread(low=7.0, low_rank=1, high=7.0, high_rank=1),
    }


@pytest.mark.parametrize(
    ("sums", "expected"),
    [
        ([5, 5, 5, 5], None),
        ([5, 5, 6, 5], (2, 0)),
        ([6, 5, 5, 5], (0, 1)),
        ([5, 6], (1, 0)),
    ],
)
def test_the_copy_that_differs_from_most_is_named(
    sums: list[int], expected: tuple[int, int] | None
) -> None:
    checked = [[Check(0, 0, total), Check(1, 0, 9)] for total in sums]
    one = np.ones(2, np.int64)
    checks = [Table.of(each, lowest=one * rank, holders=one) for rank, each in enumerate(checked)]
    forth, back = checks[0], checks[-1]
    for check in checks[1:]:
        forth = Table.merge_all([forth, check])
    for check in checks[-2::-1]:
        back = Table.merge_all([check, back])
    parameters = [Parameter(name=n, module_name="", shape=(1,)) for n in "ab"]
    found = differing(forth, parameters)
    assert found == differing(back, parameters)
    ranks = [(divergence.rank, divergence.other) for divergence in found]
    assert ranks == ([] if expected is None else [expected])
    assert all(divergence.parameter == "a" and divergence.declared for divergence in found)


def test_stages_whose_parameters_have_equal_names_are_told_apart() -> None:
    parts = [part(rank, 3.0 + rank, stage=rank) for rank in range(2)]
    record = WholeRecords().record(merge(parts))
    assert record is not None
    names = [parameter.name for parameter in record.layout.parameters]
    assert names == ["stage0.layer.weight", "stage1.layer.weight"]
    assert record.total_grad_norm == 5.0


def test_a_layout_need_not_be_sent_again() -> None:
    whole, full = WholeRecords(), part(0, 1.0)
    light = replace(full, step=1, stages={(0, "a"): replace(full.stages[0, "a"], layout=None)})
    assert whole.record(light) is None
    assert whole.record(full) is not None
    record = whole.record(light)
    assert record is not None
    assert record.layout.parameters[0].name == "layer.weight"


@pytest.mark.parametrize(
    ("parts", "fault"),
    [([0, 0], "the same rank"), ([], "steps"), ([0, 1], "steps")],
)
def test_parts_that_do_not_belong_together_are_refused(parts: list[int], fault: str) -> None:
    several = [replace(part(rank, 1.0), step=rank) for rank in parts]
    with pytest.raises(ValueError, match=fault):
        merge(several)


@given(shards=SHARDS)
def test_bytes_hold_all_of_a_part(shards: list[NDArray[np.float32]]) -> None:
    whole = merge(
        [part(rank, 1.0, table=table(rank, values)) for rank, values in enumerate(shards)]
    )
    _, again = decode(Message, encode(Message.of([whole, whole]))).parts
    assert encode(decode(Measured, encode(again))) == encode(again)
    assert again.stages.keys() == whole.stages.keys()
    assert again.tensors.rows == whole.tensors.rows
    got, expected = (whole_tensors(one.tensors)[ROW].sketch for one in (again, whole))
    np.testing.assert_array_equal(got.counts, expected.counts)
    np.testing.assert_array_equal(got.buckets, expected.buckets)
    assert_moments_close(got, expected, rtol=0)


def test_counts_of_samples_keep_seven_digits() -> None:
    sketch = sketch_array(np.arange(1, 9))
    sampled = TensorRecord(sketch=replace(sketch, counts=sketch.counts * 1e9 / 7))
    tensors = tensors_of(0, {ROW: Share()}, sampled.rows)
    got = decode(Measured, encode(part(0, 1.0, table=tensors))).tensors.content.counts
    np.testing.assert_allclose(got, sampled.sketch.counts, rtol=1e-7)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: b"telemetry-ranks-0\n" + data[len(FORMAT) :], "the same version"),
        (lambda data: b"", "the same version"),
        (lambda data: data[:-20], "damaged"),
        (lambda data: FORMAT + b"x" * 50, "damaged"),
        (lambda data: FORMAT + pickle.dumps(os.getcwd), "damaged.*getcwd"),
        (lambda data: FORMAT + pickle.dumps((1, 2)), "damaged.*tuple"),
    ],
)
def test_bytes_of_another_version_are_refused(damage: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        decode(Measured, damage(encode(part(0, 1.0))))


@pytest.mark.parametrize("name", ["columns", "buckets", "counts"])
def test_columns_of_another_length_are_damage(name: str) -> None:
    whole = table(0, np.ones(3, np.float32))
    short = replace(whole.content, **{name: getattr(whole.content, name)[:-1]})
    with pytest.raises(ValueError, match="do not fit together"):
        replace(whole, content=short)


def part(rank: int, norm: float, *, stage: int = 0, table: Table | None = None) -> Measured:
    """Of a rank that holds a shard of one gradient."""
    layout = Layout(
        modules=(Module(name="layer", type_name="Linear"),),
        parameters=(Parameter(name="layer.weight", module_name="layer", shape=(4,)),),
    )
    own = MeasuredParameters(
        stage=stage,
        layout_id="a",
        layout=layout,
        grads=Table.of(
            range(1), norm=np.array([norm]), present=np.ones(1, bool), finite=np.isfinite([norm])
        ),
    )
    return Measured(
        step=0,
        wall_time=0.0,
        size=8,
        ranks=frozenset((rank,)),
        stages={own.key: own},
        tensors=NO_ROWS if table is None else table,
        alike=(rank,),
    )

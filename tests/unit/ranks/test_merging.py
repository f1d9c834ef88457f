"""Merging shards equals measuring the whole tensor, in any order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from telemetry import StepRecord, TensorRecord
from telemetry.events.message_pack import encode
from telemetry.ranks.merging import (
    MergedRecords,
    MergedStep,
    differing,
    merge_column,
    merge_tensors,
    with_whole_units,
)
from telemetry.ranks.rank_record import RankRecord, TensorKey, TensorTable, decode
from telemetry.ranks.topology import LocalShard
from telemetry.records import AttentionHeads, Parameter, Spread
from telemetry.records.sketch import sketch_array
from telemetry.records.step import By
from tests.helpers.known_runs import layout_of
from tests.helpers.moments_close import assert_moments_close

KEY = TensorKey(0, "weights", "layer.weight")
VALUES = st.floats(allow_nan=True, allow_infinity=True, width=32)
SHARDS = st.lists(arrays(np.float32, st.integers(0, 20), elements=VALUES), min_size=1, max_size=6)


def record_of(values: NDArray[Any], **units: Any) -> TensorRecord:
    return TensorRecord(sketch=sketch_array(values), **units)


def table(values: NDArray[Any], **shard: Any) -> TensorTable:
    return TensorTable.of({KEY: LocalShard(**shard)}, record_of(values).rows)


def merge(parts: Sequence[RankRecord]) -> MergedStep:
    merged = MergedStep(parts[0])
    for one in parts[1:]:
        merged.add(one)
    return merged


def record_from(parts: Sequence[RankRecord]) -> StepRecord:
    return MergedRecords().record(merge(parts))


@pytest.mark.slow
@given(shards=SHARDS, data=st.data())
def test_shards_add_up_in_any_grouping_and_other_copies_do_not_count(
    shards: list[NDArray[np.float32]], data: st.DataObject
) -> None:
    tables = [table(shard) for shard in shards] + [table(shard, copy=1) for shard in shards]
    while len(tables) > 1:
        tables = data.draw(st.permutations(tables))
        size = data.draw(st.integers(2, len(tables)))
        tables = [merge_tensors(tables[:size]), *tables[size:]]
    whole = sketch_array(np.concatenate(shards))
    got = with_whole_units(tables[0])[KEY].sketch
    assert_moments_close(got, whole, rtol=1e-13)
    np.testing.assert_array_equal(got.buckets, whole.buckets)
    np.testing.assert_array_equal(got.counts, whole.counts)


NORMS = st.lists(
    st.floats(0, 1e300) | st.just(math.inf) | st.just(math.nan), min_size=1, max_size=6
)


@given(norms=NORMS, data=st.data())
def test_norms_of_shards_merge_without_overflow(norms: list[float], data: st.DataObject) -> None:
    """NaN and infinity add up to NaN."""
    whole = math.nan if any(map(math.isnan, norms)) else math.hypot(*norms)
    parts = [part(rank, norm) for rank, norm in enumerate(norms)]
    copies = [part(10, 1e301, copy=3), *parts, part(11, math.nan, copy=2)]
    for several in (parts, data.draw(st.permutations(copies))):
        columns = {"grad_norms": By.NORM, "grad_present": By.ANY, "grad_finite": By.ALL}
        norm, present, finite = (
            merge_column(
                by, [(getattr(o.record, name), o.grad_copies, np.array([1])) for o in several], 2
            ).tolist()
            for name, by in columns.items()
        )
        assert norm == [0, pytest.approx(whole, rel=1e-14, nan_ok=True)]
        assert present == [False, True]
        assert finite == [True, bool(np.isfinite(norms).all())]


def test_units_of_several_shards_are_joined_if_complete() -> None:
    low = np.array([1, 2], np.float32)
    pieces = [
        TensorTable.of(
            {KEY: LocalShard(piece=rank % 2, pieces=2)},
            record_of(low, unit_min=low - rank, unit_max=low + rank).rows,
        )
        for rank in range(4)
    ]
    record = with_whole_units(merge_tensors(pieces))[KEY]
    np.testing.assert_array_equal(record.unit_min, [-1, 0, -2, -1])
    np.testing.assert_array_equal(record.unit_max, [3, 4, 4, 5])
    incomplete = with_whole_units(merge_tensors(pieces[::2]))[KEY]
    assert incomplete.unit_min is None


NUMBERS = st.sampled_from([1.0, 2.0, math.nan, math.inf])


@given(st.lists(st.dictionaries(st.sampled_from("abc"), NUMBERS), min_size=1, max_size=5))
def test_figures_are_means_and_spreads_of_the_ranks_that_have_them(
    logged: list[dict[str, float]],
) -> None:
    """The lowest rank of each extreme is named."""
    records = [StepRecord(step=0, scalars=own, usage=own) for own in logged]
    parts = [RankRecord(rank=rank, size=5, record=own) for rank, own in enumerate(records)]
    record = record_from(parts[::-1])
    assert record.ranks is not None
    means, spreads = record.scalars, record.ranks.scalars
    assert means.keys() == {name for own in logged for name in own}
    for name, mean in means.items():
        values = {rank: own[name] for rank, own in enumerate(logged) if name in own}
        assert mean == pytest.approx(np.mean([*values.values()]), nan_ok=True)
        known = [rank for rank, value in values.items() if not math.isnan(value)]
        if not known:
            assert name not in spreads
            continue
        low, high = min(known, key=values.__getitem__), max(known, key=values.__getitem__)
        assert spreads[name] == Spread(
            low=values[low], low_rank=low, high=values[high], high_rank=high
        )
    assert record.ranks.usage == spreads


@pytest.mark.parametrize(
    ("sums", "expected"),
    [([5, 5, 5, 5], []), ([5, 5, 6, 5], [(2, 0)]), ([6, 5, 5, 5], [(0, 1)]), ([5, 6], [(1, 0)])],
)
def test_the_rank_whose_copy_differs_from_most_is_named(
    sums: list[int], expected: list[tuple[int, int]]
) -> None:
    checks = [(0, 0, total, rank) for rank, total in enumerate(sums)]
    checks += [(1, 0, 9, rank) for rank, _ in enumerate(sums)]
    parameters = [Parameter(name=n, module_name="", shape=(1,)) for n in "ab"]
    found = differing(np.array(checks).T, parameters)
    assert found == differing(np.array(checks[::-1]).T, parameters)
    assert [(divergence.rank, divergence.other) for divergence in found] == expected
    assert all(divergence.parameter == "a" and divergence.declared for divergence in found)


def test_stages_with_equal_parameter_names_are_distinguished() -> None:
    parts = [part(rank, 3.0 + rank, stage=rank) for rank in range(2)]
    record = record_from(parts)
    names = [parameter.name for parameter in record.layout.parameters]
    assert names == ["stage0.layer.weight", "stage1.layer.weight"]
    assert record.total_grad_norm == 5.0


def record_with(stages: Sequence[int], **of_ranks: Sequence[Any]) -> StepRecord:
    """Return the record of ranks in these stages, with values of ``layer`` and another."""
    parts = [
        part(
            rank, 1.0, stage=stage, copy=rank,
            **{name: {"layer": own[rank], "other": own[rank]} for name, own in of_ranks.items()},
        )
        for rank, stage in enumerate(stages)
    ]  # fmt: skip
    return record_from([decode(RankRecord, one.encode()) for one in parts])


def test_heads_have_the_largest_logit_and_the_mean_entropy_of_the_ranks() -> None:
    heads = [
        AttentionHeads(np.array([1.0, -5.0]), np.array([0.5, 0.25])),
        AttentionHeads(np.array([-2.0, 3.0]), np.array([1.0, np.nan])),
    ]
    record = record_with([0, 0], attention=heads)
    assert [*record.attention] == ["layer", "other"]
    assert record.attention["layer"].logit_max.tolist() == [1.0, 3.0]
    assert record.attention["layer"].entropy.tolist() == [0.75, 0.25]
    staged = record_with([0, 1], attention=heads)
    assert [*staged.attention] == [
        f"stage{n}.{name}" for n in (0, 1) for name in ("layer", "other")
    ]


def test_tokens_of_experts_add_up_over_the_ranks_of_a_stage() -> None:
    loads = [np.array([3, 0, 5]), np.array([1, 2, 0])]
    record = record_with([0, 0], expert_loads=loads)
    assert record.expert_loads["layer"].tolist() == [4, 2, 5]
    staged = record_with([0, 1], expert_loads=loads)
    assert {name: load.tolist() for name, load in staged.expert_loads.items()} == {
        "stage0.layer": [3, 0, 5], "stage0.other": [3, 0, 5],
        "stage1.layer": [1, 2, 0], "stage1.other": [1, 2, 0],
    }  # fmt: skip


@pytest.mark.parametrize(("rank", "step"), [(0, 0), (1, 1)])
def test_repeated_ranks_and_other_steps_are_refused(rank: int, step: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} sent step {step}"):
        merge([part(0, 1.0), part(rank, 1.0, step=step)])


def part(
    rank: int, norm: float, *, stage: int = 0, copy: int = 0, step: int = 0, **values: Any
) -> RankRecord:
    """Return the record of a rank with a shard of one gradient."""
    record = StepRecord(
        step=step, grad_norms=np.array([norm]), grad_present=np.ones(1, bool),
        grad_finite=np.isfinite([norm]), **values,
    )  # fmt: skip
    return RankRecord(
        rank=rank, size=8, record=record, stage=stage, layout_id="a",
        layout=encode(layout_of(["layer"])), grad_copies=np.array([copy]),
    )  # fmt: skip

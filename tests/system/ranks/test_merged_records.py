"""Records of several ranks together equal those of one process with the whole batch."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from telemetry.alerts.ranks_diverge import RanksDiverge
from telemetry.ranks.merging import MergedRecords, MergedStep
from telemetry.ranks.partial_record import PartialRecord, decode
from telemetry.records import Output, StepRecord, TensorRecord
from telemetry.records.buckets import LAST_BUCKET
from telemetry.records.moments import COUNTS
from telemetry.records.tensor import Tensors
from telemetry.testing import alerts_of
from tests.helpers import training
from tests.helpers.members import Process, every

ON_TWO = [
    "ddp",
    "ddp inside",
    "by hand",
    "fsdp",
    "tp",
    "sequence",
    "pipeline",
    "experts",
    "fsdp1",
    "ddp, tampered",
    "ddp, poisoned",
]
ON_FOUR = ["hsdp", "fsdp tp", "ddp tp", "fsdp", "experts", "hsdp, tampered"]
UNCLIPPED = ["tp", "pipeline", "ddp tp", "ddp tp inside"]
CLIPPED = ["ddp", "fsdp", "sequence", "hsdp", "fsdp tp"]  # after gradients were reduced
WAYS = [(2, name) for name in ON_TWO] + [(4, name) for name in ON_FOUR]
HEALTHY = [way for way in WAYS if "," not in way[1] and way[1] != "fsdp1"]
OUTPUT_GRADS = {"tp": 1, "sequence": 1, "fsdp tp": 2, "ddp tp": 2, "pipeline": 2}
OUTPUT_GRADS["ddp tp inside"] = 2
"""Factors on the gradients of outputs; by default the number of ranks. Each backward pass starts
from the mean over its part of the batch."""


def single(way: str) -> str:
    """Return the equivalent training of one process."""
    if "experts" in way:
        return "alone experts"
    return "alone unclipped" if way in UNCLIPPED else "alone"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Folder with the parts of all ranks, and the results of each training on each rank."""

    folder: Path
    left: dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, two_ranks: list[Process], four_ranks: list[Process]
) -> Trained:
    """Trainings of two ranks and of four ranks."""
    folder = tmp_path_factory.mktemp("parts")
    left = {
        len(processes): every(processes, "call", training.run, folder, names)
        for processes, names in ((two_ranks, ON_TWO), (four_ranks, ON_FOUR))
    }
    return Trained(folder=folder, left=left)


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[dict[str, Any], list[StepRecord]]]:
    """Results and records of one process with the whole batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    runs = {}
    for name in ("alone", "alone unclipped", "alone experts"):
        left, records, _ = training.train(name, 0, 1, watch=True)
        runs[name] = left, records
    torch.set_num_threads(threads)
    return runs


def parts_of(trained: Trained, size: int, name: str, step: int) -> list[PartialRecord]:
    paths = [trained.folder / f"{size}-{name}-{step}-{rank}" for rank in range(size)]
    return [decode(PartialRecord, path.read_bytes()) for path in paths]


def merge(parts: Sequence[PartialRecord]) -> MergedStep:
    merged = MergedStep(parts[0])
    for part in parts[1:]:
        merged.add(part)
    return merged


def merged(trained: Trained, size: int, name: str) -> list[StepRecord]:
    """The records of all ranks, whose parts arrive in any order."""
    whole, records = MergedRecords(), []
    dice = random.Random(f"{size} {name}")
    for step in range(training.STEPS):
        parts = parts_of(trained, size, name, step)
        dice.shuffle(parts)
        record = whole.record(merge(parts))
        assert record is not None
        records.append(record)
    return records


def results_of(trained: Trained, size: int, name: str) -> list[dict[str, Any]]:
    return [left[name] for left in trained.left[size]]


@pytest.mark.parametrize(("size", "name"), WAYS)
def test_training_is_left_alone_on_every_rank(trained: Trained, size: int, name: str) -> None:
    for rank in results_of(trained, size, name):
        assert json.dumps(rank["bare"]) == json.dumps(rank["watched"])  # NaN included


@pytest.mark.parametrize(("size", "name"), HEALTHY)
def test_the_merged_record_equals_the_record_of_one_process(
    trained: Trained,
    alone: dict[str, tuple[dict[str, Any], list[StepRecord]]],
    size: int,
    name: str,
) -> None:
    left, expected = alone[single(name)]
    for got, wanted in zip(merged(trained, size, name), expected, strict=True):
        assert (got.step, got.full) == (wanted.step, wanted.full)
        assert got.ranks is not None
        assert got.ranks.held == frozenset(range(size))
        assert got.ranks.diverged == ()
        assert got.scalars == {"loss": pytest.approx(left["losses"][got.step], rel=1e-5)}
        assert_norms_close(got, wanted)
        calls = 2 if name == "pipeline" else 1  # its micro-batches
        scale = OUTPUT_GRADS.get(name, size)
        assert_tensors_close(got.inputs, wanted.inputs, calls=calls)
        assert_tensors_close(got.outputs, wanted.outputs, calls=calls)
        assert list(got.outputs) == list(wanted.outputs)
        assert_tensors_close(got.output_grads, wanted.output_grads, calls=calls, scale=scale)
        assert_tensors_close(got.grads, wanted.grads)
        assert_tensors_close(got.weights, wanted.weights)
        assert_tensors_close(got.second_moments, wanted.second_moments)
        assert got.update_ratios == pytest.approx(dict(wanted.update_ratios), rel=1e-5)


def assert_norms_close(got: StepRecord, wanted: StepRecord) -> None:
    assert got.layout.modules == wanted.layout.modules
    for parameter, expected in zip(got.layout.parameters, wanted.layout.parameters, strict=True):
        assert parameter == expected
    np.testing.assert_allclose(got.grad_norms, wanted.grad_norms, rtol=1e-5)
    np.testing.assert_array_equal(got.grad_present, wanted.grad_present)
    np.testing.assert_array_equal(got.grad_finite, wanted.grad_finite)
    assert got.learning_rates == wanted.learning_rates


def assert_tensors_close(
    got: Mapping[Any, TensorRecord],
    wanted: Mapping[Any, TensorRecord],
    *,
    calls: int = 1,
    scale: float = 1.0,
) -> None:
    """Compare with one process; buckets may differ by values that rounding moved."""
    assert set(got) == set(wanted)
    rows = Tensors.of(got).rows
    scaled = Tensors(tuple(got), rows.scaled(np.full(len(rows), 1 / scale)))
    for name, expected in wanted.items():
        actual = scaled[name]
        assert actual.calls == calls, name
        for count in COUNTS:
            assert getattr(actual.sketch, count) == getattr(expected.sketch, count), (name, count)
        size = expected.sketch.rms
        for figure in ("mean", "rms", "std", "min", "max"):
            close = pytest.approx(getattr(expected.sketch, figure), rel=1e-5, abs=1e-5 * size)
            assert getattr(actual.sketch, figure) == close, (name, figure)
        moved = np.abs(dense(actual) - dense(expected)).sum() / 2
        assert moved <= 0.02 * expected.sketch.count, name
        assert (actual.unit_min is None) == (expected.unit_min is None), name
        for which in ("unit_min", "unit_max"):
            if getattr(expected, which) is not None:
                units = getattr(actual, which), getattr(expected, which)
                np.testing.assert_allclose(*units, rtol=1e-5, atol=1e-5 * size, err_msg=str(name))


def dense(record: TensorRecord) -> NDArray[np.float64]:
    counts = np.zeros(2 * LAST_BUCKET + 1)
    counts[record.sketch.buckets.astype(int) + LAST_BUCKET] = record.sketch.counts
    return counts


@pytest.mark.parametrize(("size", "name"), [way for way in HEALTHY if way[1] in CLIPPED])
def test_the_norm_before_clipping_equals_the_value_that_clipping_returns(
    trained: Trained, size: int, name: str
) -> None:
    returned = results_of(trained, size, name)[0]["watched"]["norms"]
    for record in merged(trained, size, name):
        if record.full:
            expected = pytest.approx(returned[record.step], rel=1e-5)
            assert record.total_grad_norm_before_clipping == expected
            assert record.clipped_fraction == 1


@pytest.mark.parametrize(("size", "name"), [(2, "ddp, tampered"), (4, "hsdp, tampered")])
def test_a_parameter_that_was_changed_on_one_rank_is_named(
    trained: Trained, size: int, name: str
) -> None:
    records = merged(trained, size, name)
    (alert,) = alerts_of(records, [RanksDiverge()])
    assert (alert.kind, alert.step) == ("ranks_diverge", 2)
    assert alert.module_name == "blocks.0.norm"
    host = socket.gethostname()
    other = 0 if size == 2 else 1  # the same shard of the other copy
    ranks = f"between rank {size - 1} ({host}) and rank {other} ({host})"
    assert alert.summary == f"blocks.0.norm.weight differs {ranks}"


def test_a_rank_whose_batch_alone_is_bad_is_named(trained: Trained) -> None:
    alerts = alerts_of(merged(trained, 2, "ddp, poisoned"), [RanksDiverge()])
    assert [(alert.step, alert.stage) for alert in alerts] == [(2, "started")]
    assert "on rank 1 (" in alerts[0].summary
    assert "alone, first in the output of blocks.0.norm" in alerts[0].summary


@pytest.mark.parametrize(("size", "name"), HEALTHY)
def test_ranks_that_agree_raise_no_alert(trained: Trained, size: int, name: str) -> None:
    assert alerts_of(merged(trained, size, name), [RanksDiverge()]) == []


def test_the_spread_over_ranks_names_the_ranks_of_the_extremes(trained: Trained) -> None:
    losses = [rank["watched"]["losses"] for rank in results_of(trained, 2, "ddp")]
    for step, record in enumerate(merged(trained, 2, "ddp")):
        assert record.ranks is not None
        spread = record.ranks.scalars["loss"]
        low, high = sorted((losses[rank][step], rank) for rank in range(2))
        assert (spread.low, spread.low_rank, spread.high, spread.high_rank) == (*low, *high)
        assert (record.ranks.step_s is None) == (step == 0)
        if record.full:
            rms = record.ranks.activation_rms[Output("head")]
            assert rms.low < record.outputs[Output("head")].sketch.rms < rms.high
            assert {rms.low_rank, rms.high_rank} == {0, 1}


def test_each_replicated_parameter_is_measured_on_one_rank(trained: Trained) -> None:
    """Under DDP the ranks share parameters and gradients, and each measures its own outputs."""
    parts = parts_of(trained, 2, "ddp", 0)
    weights = [{row.name for row in p.tensors.rows if row.kind == "weights"} for p in parts]
    assert weights[0] & weights[1] == set()
    assert {len(names) for names in weights} == {7}
    outputs = [[row.name for row in p.tensors.rows if row.kind == "outputs"] for p in parts]
    assert outputs[0] == outputs[1]


def test_a_merged_record_lists_a_missing_rank(trained: Trained) -> None:
    record = MergedRecords().record(merge(parts_of(trained, 4, "fsdp", 0)[:3]))
    assert record is not None
    assert record.ranks is not None
    assert record.ranks.missing == (3,)
    assert record.ranks.size == 4


def test_flat_parameters_have_no_checksums(trained: Trained) -> None:
    """Shards with equal initial values, such as biases, are no replicas."""
    for part in parts_of(trained, 2, "fsdp1", 0):
        assert part.parameters is not None
        assert part.parameters.checks.size == 0

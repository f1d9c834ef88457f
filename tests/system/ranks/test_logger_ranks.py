"""Several ranks write one run, which equals the run of one process with the whole batch."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import multiprocessing

import telemetry
from tests.helpers import logging_ranks, training
from tests.helpers.loops import load
from tests.helpers.members import Ranks, every, ranks
from tests.helpers.twins import seed

ON_TWO = [
    *("ddp", "ddp inside", "fsdp", "by hand", "tp", "sequence", "pipeline"),
    *("experts", "ignored experts"),
]
ON_FOUR = ["fsdp", "hsdp", "fsdp tp", "ddp tp", "ddp tp inside", "experts"]
MERGED = [*((2, way) for way in ON_TWO), *((4, way) for way in ON_FOUR)]
UNCLIPPED = ["tp", "pipeline", "ddp tp", "ddp tp inside"]

OUTPUT_GRADS = {"tp": 1, "sequence": 1, "pipeline": 2}
OUTPUT_GRADS |= dict.fromkeys(["fsdp tp", "ddp tp", "ddp tp inside"], 2)
"""Factors on the gradients of outputs; by default the number of ranks. Each backward pass starts
from the mean over its part of the batch."""

CLIPPING_UNKNOWN = ["by hand", "experts", "ignored experts", "pipeline", "ddp tp", "ddp tp inside"]
"""Gradients change after the backward pass, or their owners are unknown at its end."""


def single(way: str) -> str:
    """Return the equivalent training of one process."""
    if "experts" in way:
        return "alone experts"
    return "alone unclipped" if way in UNCLIPPED else "alone"


def one_group(folder: Path, count: int) -> Iterator[Ranks]:
    """Healthy ranks of one process group, which train one model after the other."""
    with ranks(folder, count) as processes:
        yield processes
        for process in processes:
            assert process.occurrences("telemetry failed") == 0, process.log.read_text()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from one_group(tmp_path_factory.mktemp("group"), 2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    yield from one_group(tmp_path_factory.mktemp("group"), 4)


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks, four_ranks: Ranks
) -> dict[tuple[int, str], tuple[Path, list[Any]]]:
    """Runs and training results, by number of ranks and way of training."""
    folder, groups = tmp_path_factory.mktemp("runs"), {2: two_ranks, 4: four_ranks}
    runs = {}
    for size, way in MERGED:
        run = folder / f"{size} {way}"
        left = every(groups[size], "call", logging_ranks.twins, way, run)
        runs[size, way] = run, left
    return runs


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Runs and training results of one process with the whole batch."""
    runs = {}
    for way in ("alone", "alone unclipped", "alone experts"):
        folder = tmp_path_factory.mktemp("alone")
        runs[way] = folder, logging_ranks.train(0, 1, way, folder)
    return runs


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = load(run)
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def files_of(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("**/events.out.*"))


@pytest.mark.parametrize(("size", "way"), MERGED)
def test_the_run_equals_the_run_of_one_process_and_training_is_left_alone(
    trained: Any, alone: Any, size: int, way: str
) -> None:
    run, left = trained[size, way]
    assert [rank["bare"] == rank["watched"] for rank in left] == [True] * size
    one_process = alone[single(way)][0]
    assert len(files_of(run)) == 1
    got, wanted = scalars(run), scalars(one_process)
    for tag, points in wanted.items():
        if tag in ("own", "accuracy") or ("clipp" in tag and way in CLIPPING_UNKNOWN):
            continue
        if tag == "time/examples_per_s":  # of all ranks together, they are not known
            continue
        assert [step for step, _ in got[tag]] == [step for step, _ in points], tag
        if tag.startswith(("time/", "memory/")):
            continue
        # Each rank's backward is called with the mean over its part of the batch.
        scale = OUTPUT_GRADS.get(way, size) if tag.startswith("activation_grad") else 1
        values = [value / scale for _, value in got[tag]]
        assert values == pytest.approx([value for _, value in points], rel=1e-5, abs=1e-7), tag
    merged, whole = telemetry.read(run), telemetry.read(one_process)
    assert [alert for alert in merged.alerts if alert.kind == "ranks_diverge"] == []
    for layer in merged.layers.module_name.unique():
        units, wanted_units = merged.units(layer), whole.units(layer)
        assert units.steps.tolist() == wanted_units.steps.tolist()
        np.testing.assert_allclose(units.extremes, wanted_units.extremes, rtol=0.01, atol=1e-6)
    assert len(whole.histogram_tags) > 20
    assert merged.histogram_tags == whole.histogram_tags
    for tag in whole.histogram_tags:
        is_scaled = tag.startswith("activation_grad")
        assert_histograms_close(merged, whole, tag, OUTPUT_GRADS.get(way, size) * is_scaled or 1)


def assert_histograms_close(
    merged: telemetry.Run, whole: telemetry.Run, tag: str, scale: float
) -> None:
    """Compare counts, which may differ by values that rounding moved into the next bucket."""
    got, wanted = merged.histogram(tag), whole.histogram(tag)
    assert got.keys() == wanted.keys()
    for step, buckets in wanted.items():
        own = got[step]
        count = buckets[:, 2].sum()
        assert own[:, 2].sum() == count
        if "log10" in tag and scale != 1:
            continue
        edges = np.intersect1d(own[:, 1] / scale, buckets[:, 1])
        assert len(edges) >= len(buckets) // 2, (tag, step)
        own_below = np.cumsum(own[:, 2])[np.isin(own[:, 1] / scale, edges)]
        below = np.cumsum(buckets[:, 2])[np.isin(buckets[:, 1], edges)]
        assert np.abs(own_below - below).max() <= 0.02 * count, (tag, step)


@pytest.mark.parametrize("way", ["ddp", "fsdp", "by hand"])
def test_logged_scalars_are_means_over_ranks(trained: Any, way: str) -> None:
    run, left = trained[2, way]
    losses = [rank["watched"]["losses"] for rank in left]
    got = scalars(run)
    steps = range(training.STEPS)
    means = [(losses[0][step] + losses[1][step]) / 2 for step in steps]
    assert [step for step, _ in got["loss"]] == list(steps)
    assert [value for _, value in got["loss"]] == pytest.approx(means, rel=1e-6)
    assert got["own"] == [(step, 0.5) for step in steps]
    assert got["accuracy"] == [(training.STEPS, 0.5)]
    for name, pick in {"min": min, "max": max}.items():
        found = [pick((losses[rank][step], rank) for rank in range(2)) for step in steps]
        values = [value for _, value in got[f"rank_spread/loss/{name}"]]
        of_ranks = [rank for _, rank in got[f"rank_spread/loss/{name}_rank"]]
        assert list(zip(values, of_ranks, strict=True)) == [(pytest.approx(v), r) for v, r in found]
    assert [step for step, _ in got["rank_time/slowest"]] == list(steps)[1:]
    assert {rank for _, rank in got["rank_time/slowest_rank"]} <= {0, 1}


def test_the_spread_of_activations_is_the_ratio_of_the_ranks_root_mean_squares(
    trained: Any,
) -> None:
    seed(0)
    model = training.Net()
    outputs = [model(half) for half in training.batches()[0].chunk(2)]
    low, high = sorted(float(out.detach().square().mean().sqrt()) for out in outputs)
    step, spread = scalars(trained[2, "ddp"][0])["rank_spread/0008.head"][0]
    assert (step, spread) == (0, pytest.approx(1 - low / high, rel=1e-3))


@pytest.mark.parametrize(
    ("way", "options"),
    [
        ("by hand", {}),
        ("ddp", {"is_wrapped": False}),
        ("ddp", {"micro_batches": 2}),
        ("fsdp", {}),
        ("fsdp", {"is_wrapped": False}),
        ("fsdp", {"is_wrapped": False, "alone": True}),
    ],
)
def test_each_rank_writes_its_own_run_of_its_local_shards(
    two_ranks: Ranks, tmp_path: Path, way: str, options: dict[str, Any]
) -> None:
    calls = options.get("micro_batches", 1)
    of_ranks = every(two_ranks, "call", logging_ranks.shards, way, tmp_path, **options)
    for rank, left in enumerate(of_ranks):
        watched, records = left["watched"], left["records"]
        assert left["bare"] == watched
        if rank and "alone" in options:
            assert records == []
            continue
        run = tmp_path / f"rank-000{rank}"
        assert len(files_of(run)) == 1
        assert [value for _, value in scalars(run)["loss"]] == pytest.approx(watched["losses"])
        assert [record.step for record in records] == list(range(training.STEPS))
        for record in records[::2]:
            assert {tensor.calls for tensor in record.activations.values()} == {calls}
            assert {tensor.calls for tensor in record.activation_grads.values()} == {calls}
            assert record.activations["head"].sketch.count == calls * 4 * 4 * 3
            weights = [tensor.sketch.count for tensor in record.weights.values()]
            assert weights == [*map(len, watched["parameters"])]
            assert len(record.update_ratios) == len(weights)
            assert not np.isnan([*record.update_ratios.values()]).any()
            moments = [tensor.sketch.sum for tensor in record.second_moments.values()]
            assert moments == pytest.approx(watched["second_moments"][record.step], rel=1e-5)
            if way == "by hand" or (way == "fsdp" and "is_wrapped" in options and not record.step):
                continue  # gradients change later, or parameters did after the step had started
            expected = watched["norms"][record.step]
            assert record.total_grad_norm_before_clipping == pytest.approx(expected, rel=1e-5)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["rank-0000", "rank-0001"][: 1 if "alone" in options else 2]


def test_only_rank_0_writes(two_ranks: Ranks, tmp_path: Path) -> None:
    left = every(two_ranks, "call", logging_ranks.twins, "by hand", tmp_path, ranks="rank0")
    assert [rank["bare"] == rank["watched"] for rank in left] == [True, True]
    assert len(files_of(tmp_path)) == 1
    got = scalars(tmp_path)
    assert [value for _, value in got["loss"]] == pytest.approx(left[0]["watched"]["losses"])
    assert got["own"][0] == (0, 0.0)


def test_all_ranks_raise_at_the_same_step(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = every(two_ranks, "call", logging_ranks.until_raised, tmp_path)
    assert first == second
    step, summary = first
    assert step >= 3
    assert summary == "stop here"


@pytest.mark.parametrize(("way", "other"), [("ddp", 0), ("hsdp", 1)])
def test_a_weight_that_changes_on_one_rank_is_named(
    request: pytest.FixtureRequest, tmp_path: Path, way: str, other: int
) -> None:
    """The other rank has the same shard of another copy."""
    processes = request.getfixturevalue("two_ranks" if way == "ddp" else "four_ranks")
    [alert], *others = every(processes, "call", logging_ranks.tampered, way, tmp_path)
    step, summary = alert
    assert 50 <= step <= 60
    host = socket.gethostname()
    ranks = f"between rank {len(processes) - 1} ({host}) and rank {other} ({host})"
    assert summary == f"blocks.0.norm.weight differs {ranks}"
    assert not any(others)


@pytest.mark.parametrize(("every_n_steps", "kind"), [(10, "nonfinite"), (5, "ranks_diverge")])
def test_a_rank_whose_batch_alone_is_bad_is_named_and_the_batches_of_all_are(
    two_ranks: Ranks, tmp_path: Path, every_n_steps: int, kind: str
) -> None:
    """Only a full step shows which rank alone has a NaN."""
    every(two_ranks, "call", logging_ranks.poisoned, every_n_steps, tmp_path)
    [alert] = telemetry.read(tmp_path).alerts
    assert (alert.kind, alert.step, alert.stage) == (kind, 25, "started")
    if kind == "ranks_diverge":
        assert "on rank 1 (" in alert.summary
        assert "alone, first in the output of 0" in alert.summary
    batches = [(batch.step, batch.rank, batch.ids) for batch in alert.batches]
    assert batches == [(25, 0, ("0/25",)), (25, 1, ("1/25",))]


def test_ranks_share_the_measurement_of_replicated_parameters(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Under DDP, each rank measures its own outputs."""
    parts = every(two_ranks, "call", logging_ranks.first_sent, "ddp", tmp_path)
    weights, outputs = (
        [[key.name for key in part.tensors.keys if key.kind == kind] for part in parts]
        for kind in ("weights", "outputs")
    )
    assert [len(names) for names in weights] == [7, 7]
    assert set(weights[0]).isdisjoint(weights[1])
    assert outputs[0] == outputs[1]


def test_flat_parameters_are_not_compared(two_ranks: Ranks, tmp_path: Path) -> None:
    """Shards with equal initial values, such as biases, are no replicas."""
    for part in every(two_ranks, "call", logging_ranks.first_sent, "fsdp1", tmp_path):
        assert part.checks.size == 0


def test_a_gradient_that_is_a_large_sum_over_ranks_is_logged_once(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """Ranks add up gradients of up to 65,536 elements."""
    before = [process.occurrences("65536 elements") for process in two_ranks]
    every(two_ranks, "call", logging_ranks.sum_of_many, tmp_path)
    after = [process.occurrences("65536 elements") for process in two_ranks]
    assert after == [before[0] + 1, before[1]]


APART: dict[str, list[str]] = {
    "other models": [],
    "a sweep": [],  # of models with equal initial weights
    "averages": [],
    "DiLoCo": [],
    "post-local": [],
    "no_sync and averages": ["started", "resolved"],
    "never synchronized": ["started"],
    "called past DDP": ["started"],
    "gradients averaged": [],
    "tampered": ["started"],
}


@pytest.mark.parametrize("every_n_steps", [1, 10])
@pytest.mark.parametrize("way", APART)
def test_copies_that_are_not_kept_equal_raise_only_the_expected_alerts(
    two_ranks: Ranks, tmp_path: Path, way: str, every_n_steps: int
) -> None:
    alerts, others = every(two_ranks, "call", logging_ranks.apart, way, every_n_steps, tmp_path)
    assert [stage for stage, *_ in alerts] == APART[way]
    assert others == []
    for stage, _, message in alerts:
        assert stage == "resolved" or ("no_sync()" in message and "averaged" in message)


@pytest.mark.parametrize("way", ["ddp", "fully_shard", "by hand"])
@pytest.mark.parametrize("same", [True, False])
def test_ranks_that_get_the_same_batch_are_named(
    two_ranks: Ranks, tmp_path: Path, way: str, same: bool
) -> None:
    alerts, others = every(two_ranks, "call", logging_ranks.fed, way, same, tmp_path)
    if same and way != "by hand":  # nothing requires different data on each rank here
        assert alerts == [("warning", alerts[0][1])]
        assert alerts[0][1].startswith("ranks 0-1 of 2 get the same batch")
    else:
        assert alerts == []
    assert others == []


def test_loggers_that_precede_the_process_group_write_one_run(tmp_path: Path) -> None:
    multiprocessing.start_processes(  # which mp.spawn is, with another start method
        logging_ranks.started_before_the_group,
        args=(str(tmp_path),),
        nprocs=2,
        start_method="forkserver",
    )
    assert [len(files_of(tmp_path / name)) for name in ("merged", "first")] == [1, 1]
    got = scalars(tmp_path / "merged")
    steps = [step for step, _ in got["grad_norm/total"]]
    assert steps == list(range(len(steps)))
    assert [value for _, value in got["validation/activation_mean/0000.0"]] != []
    assert [value for _, value in got["own"]] == [0.5], "of the step that did not end"
    assert [tag for tag in got if tag.startswith("validation/rank_spread/own")] == []


@pytest.fixture
def three(tmp_path: Path) -> Iterator[Ranks]:
    """Three ranks that train independently."""
    with ranks(tmp_path, 3) as processes:
        yield processes


def bare(steps: int) -> Any:
    """Results of the same training without a logger."""
    loner = logging_ranks.Loner(None)
    loner.train_to(steps)
    return loner.left()


def test_ranks_that_hang_or_die_are_reported_and_the_others_continue(
    three: Ranks, tmp_path: Path
) -> None:
    first, second, third = three
    every(three, "call", logging_ranks.begin, tmp_path / "run")
    every(three, "call", logging_ranks.train_to, 4)
    second.signal(signal.SIGSTOP)
    every([third, first], "call", logging_ranks.train_to, 8)
    second.signal(signal.SIGCONT)
    second.do("call", logging_ranks.train_to, 8)
    first.do("call", logging_ranks.wait_until_expecting, 1)
    every([third, second, first], "call", logging_ranks.train_to, 12)
    third.signal(signal.SIGKILL)
    every([second, first], "call", logging_ranks.train_to, 16)
    first.do("call", logging_ranks.log, 1.0)  # of step 16, which only the other rank ends
    second.do("call", logging_ranks.train_to, 17)
    left = every([first, second], "call", logging_ranks.end)
    assert [rank["left"] for rank in left] == [bare(16), bare(17)]
    held = [[0, 1, 2], [0, 2], [0, 1, 2], [0, 1]]
    assert left[0]["held"] == [ranks for ranks in held for _ in range(4)] + [[0, 1]]
    assert left[0]["counts"] == [2 * 8 * len(ranks) for ranks in held for _ in range(2)] + [2 * 8]
    for line in (
        "from step 4 on, the records hold 2 of 3 ranks: rank 1 sent nothing in time",
        "from step 8 on, the records hold what rank 1 measured",
        "from step 12 on, the records hold 2 of 3 ranks: rank 2 sent nothing in time",
        "full steps: 8 scheduled",
    ):
        assert first.occurrences(line) == 1, first.log.read_text()
    # These four, and the command that shows the run.
    assert first.occurrences("telemetry:") == 5, first.log.read_text()
    assert first.occurrences("tensorboard --logdir") == 1
    steps = [step for step, _ in scalars(tmp_path / "run")["grad_norm/total"]]
    assert steps == list(range(17))


def test_a_rank_without_a_logger_and_one_with_another_interval_are_reported(
    three: Ranks, tmp_path: Path
) -> None:
    first, second, third = three
    for process, log_dir, every_n_steps in zip(
        three, (tmp_path / "run", tmp_path / "run", None), (2, 3, 2), strict=True
    ):
        process.do("call", logging_ranks.begin, log_dir, every_n_steps)
    every([third, second, first], "call", logging_ranks.train_to, 7)
    left = every([third, second, first], "call", logging_ranks.end)
    assert [rank["left"] for rank in left] == [bare(7)] * 3
    assert left[2]["held"] == [[0, 1]] * 7
    measured: list[list[int]] = [[0, 1], [], [0], [1], [0], [], [0, 1]]
    assert left[2]["measured"] == measured
    assert left[2]["counts"] == [2 * 8 * len(ranks) for ranks in measured if ranks]
    for line in (
        "from step 0 on, the records hold 2 of 3 ranks: rank 2 made no HookLogger",
        "step 2 was measured in full by rank 0 and not by rank 1; use the same every_n_steps",
        "full steps: 4 scheduled",
    ):
        assert first.occurrences(line) == 1, first.log.read_text()
    # These three, and the command that shows the run.
    assert first.occurrences("telemetry:") == 4, first.log.read_text()
    assert first.occurrences("tensorboard --logdir") == 1


def test_training_continues_without_file_descriptors_for_an_exchange(
    three: Ranks, tmp_path: Path
) -> None:
    second = three[1]
    second.do("call", logging_ranks.begin_without_descriptors, tmp_path / "run")
    second.do("call", logging_ranks.train_to, 4)
    assert second.do("call", logging_ranks.end)["left"] == bare(4)
    log = second.log.read_text()
    assert "rank 1 exchanges no records with the others: [Errno 24]" in log
    assert len(log.splitlines()) == 1


def test_flat_parameters_are_measured_on_rank_0_and_activations_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    first = two_ranks[0]
    before = first.occurrences("FullyShardedDataParallel flattens parameters")
    left = every(two_ranks, "call", logging_ranks.twins, "fsdp1", tmp_path)
    assert [rank["bare"] == rank["watched"] for rank in left] == [True, True]
    assert first.occurrences("FullyShardedDataParallel flattens parameters") == before + 1
    assert two_ranks[1].occurrences("FullyShardedDataParallel flattens parameters") == 0
    steps = [step for step, _ in scalars(tmp_path)["grad_norm/total"]]
    assert steps == list(range(training.STEPS))
    run = telemetry.read(tmp_path)
    assert run.alerts == ()
    counts = {tag: run.histogram(tag)[0][:, 2].sum() for tag in run.histogram_tags}
    [head] = [n for tag, n in counts.items() if tag.startswith("activation/") and "head" in tag]
    assert head == training.BATCH * training.LENGTH * training.CLASSES
    shard = left[0]["watched"]["parameters"]
    weights = [count for tag, count in counts.items() if tag.startswith("weight/")]
    assert sorted(weights) == sorted(len(values) for values in shard if values)

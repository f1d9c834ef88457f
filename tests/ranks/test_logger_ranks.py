"""Several ranks write one run with one line, and it is that of one process with the whole batch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import logging_ranks
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(logging_ranks.__file__)
MERGED = ["ddp", "fsdp", "plain"]


def launch(folder: Path, *cases: str) -> subprocess.CompletedProcess[str]:
    """Two ranks by ``torchrun``."""
    path = os.pathsep.join(map(str, [SCRIPT.parents[2], SCRIPT.parents[1], SCRIPT.parent]))
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=0", str(SCRIPT), str(folder), *cases],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks wrote and left behind, one case after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    done = launch(folder, *MERGED, "plain-each", "plain-first", "raise")
    (folder / "told").write_text(done.stderr)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "telemetry failed" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The run of one process with the whole batch, and what it left behind."""
    folder = tmp_path_factory.mktemp("alone")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    left = logging_ranks.train("alone", folder)
    torch.set_num_threads(threads)
    return folder, left


def left_by(folder: Path, case: str) -> list[Any]:
    return [json.loads((folder / f"{rank}.json").read_text())[case] for rank in range(2)]


def scalars(run: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def files_of(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("**/events.out.*"))


@pytest.mark.parametrize("case", [*MERGED, "plain-each", "plain-first"])
def test_training_is_left_alone_on_every_rank(folder: Path, case: str) -> None:
    for rank in left_by(folder, case):
        assert rank["bare"] == rank["watched"]


@pytest.mark.parametrize("case", MERGED)
def test_the_run_is_that_of_one_process(
    folder: Path, alone: tuple[Path, dict[str, Any]], case: str
) -> None:
    run = folder / case
    assert len(files_of(run)) == 1
    got, wanted = scalars(run), scalars(alone[0])
    assert set(wanted) <= set(got)
    for tag, points in wanted.items():
        if tag in ("own", "accuracy"):
            continue
        if case == "plain" and "clipp" in tag:
            continue  # nothing says that the loop adds gradients up after its backward pass
        assert [step for step, _ in got[tag]] == [step for step, _ in points], tag
        # Each rank's backward is called with the mean over its half of the batch.
        scale = 2 if tag.startswith("activation_grad") else 1
        values = [value / scale for _, value in got[tag]]
        assert values == pytest.approx([value for _, value in points], rel=1e-5, abs=1e-7), tag


@pytest.mark.parametrize("case", MERGED)
def test_what_was_logged_is_the_mean_over_ranks(folder: Path, case: str) -> None:
    losses = [rank["watched"]["losses"] for rank in left_by(folder, case)]
    got = scalars(folder / case)
    steps = range(logging_ranks.STEPS)
    means = [(losses[0][step] + losses[1][step]) / 2 for step in steps]
    assert [step for step, _ in got["loss"]] == list(steps)
    assert [value for _, value in got["loss"]] == pytest.approx(means, rel=1e-6)
    assert got["own"] == [(step, 0.5) for step in steps]
    assert got["accuracy"] == [(logging_ranks.STEPS, 0.5)]


def test_each_rank_writes_its_own_run(folder: Path) -> None:
    losses = [rank["watched"]["losses"] for rank in left_by(folder, "plain-each")]
    run = folder / "plain-each"
    assert sorted(path.name for path in run.iterdir()) == ["rank-0000", "rank-0001"]
    for rank in range(2):
        assert len(files_of(run / f"rank-000{rank}")) == 1
        got = [value for _, value in scalars(run / f"rank-000{rank}")["loss"]]
        assert got == pytest.approx(losses[rank])


def test_the_first_rank_alone_writes(folder: Path) -> None:
    losses = left_by(folder, "plain-first")[0]["watched"]["losses"]
    run = folder / "plain-first"
    assert len(files_of(run)) == 1
    assert [value for _, value in scalars(run)["loss"]] == pytest.approx(losses)
    assert scalars(run)["own"][0] == (0, 0.0)


def test_all_ranks_raise_at_the_same_step(folder: Path) -> None:
    first, second = left_by(folder, "raise")
    assert first == second
    assert first["kind"] == "told"
    assert first["message"] == "A rule said so."
    assert first["step"] >= 3


def test_a_rank_that_dies_costs_the_others_nothing(
    tmp_path: Path, alone: tuple[Path, dict[str, Any]]
) -> None:
    """With an agent each, for one agent for both would end the other."""
    store = tmp_path / "store"
    path = os.pathsep.join(map(str, [SCRIPT.parents[2], SCRIPT.parents[1], SCRIPT.parent]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), "death"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "RANK": str(rank),
                 "WORLD_SIZE": "2", "STORE": str(store)},
            stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=200)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, -9], told
    left = json.loads((tmp_path / "0.json").read_text())["death"]
    assert left["parameters"] == alone[1]["parameters"]
    assert left["close_s"] < 34
    assert told[0].count("the records hold 1 of 2 ranks") == 1, told[0]
    steps = [step for step, _ in scalars(tmp_path / "death")["grad_norm/total"]]
    assert steps == list(range(logging_ranks.STEPS))

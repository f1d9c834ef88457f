"""Each benchmark runs, prints its hardware and versions, and writes the promised rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT


def run(script: str, json_file: Path, *arguments: str) -> dict[str, Any]:
    """Return the rows of a benchmark with ``--quick``."""
    command = [sys.executable, f"benchmarks/{script}.py", "--quick", "--json", str(json_file)]
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    written: dict[str, Any] = json.loads(json_file.read_text(encoding="utf-8"))
    assert written["machine"] in done.stdout
    assert written["cores"] == os.cpu_count()
    for name in ("Python", "telemetry", "torch", "tensorboard"):
        assert f"{name} {written['versions'][name]}" in written["machine"]
    return written


@pytest.fixture
def json_file(tmp_path: Path) -> Path:
    return tmp_path / "figures.json"


def test_overhead_compares_every_recording_with_bare_training(json_file: Path) -> None:
    arguments = ("--only", "MNIST", "--threads", "1", "--markdown")
    (costs,) = run("overhead", json_file, *arguments)["figures"].values()
    ours = {"only norms", "every step", "same, no images", "same as wandb"}
    assert {"bare", "add_histogram", "every 10 steps", "every 100 steps", *ours} <= set(costs)
    assert costs["bare"]["added"] == 0
    assert all(cost["wall_ms"] > 0 for cost in costs.values())
    # The one difference that no noise hides.
    assert costs["add_histogram"]["cpu_added"] > costs["only norms"]["cpu_added"]
    mean = (9 * costs["only norms"]["wall_ms"] + costs["every step"]["wall_ms"]) / 10
    assert costs["every 10 steps"]["wall_ms"] == pytest.approx(mean)


def test_norms_measures_the_cost_of_a_light_step(json_file: Path) -> None:
    (cost,) = run("norms", json_file, "--only", "MNIST")["figures"].values()
    assert cost["parameters"] == 8
    assert cost["later_ms"] > 0
    assert cost["step_ms"] > cost["later_ms"]


def test_loops_have_a_row_for_each_default(json_file: Path) -> None:
    (costs,) = run("loops", json_file, "--only", "MLP")["figures"].values()
    assert {"bare", "default", "alerts=()", "max_overhead=0.01"} <= set(costs)
    assert costs["bare"]["added"] == 0
    assert costs["default"]["full"] >= 1


def test_dashboard_has_a_time_for_each_request_of_the_page(json_file: Path) -> None:
    (row,) = run("dashboard", json_file, "--sizes", "50x50")["figures"]
    assert (row["layers"], row["steps"]) == (50, 50)
    requested = {"start_s", "cold_ms", "warm_ms", "cell_ms", "scalars_s", "histograms_s"}
    drawn = {"page_s", "redraw_ms"} & set(row)  # where there is Chromium
    assert all(row[name] > 0 for name in requested | drawn)
    assert row["wire_kb"] * 1000 > 50 * 50 * 4 / 2  # the picture's numbers, hardly compressible


def test_scaling_has_a_row_for_each_size(json_file: Path) -> None:
    rows = run("scaling", json_file, "--modules", "5", "50")["figures"]
    assert [row["modules"] for row in rows] == [5, 50]
    for row in rows:
        assert row["bare_us"] > 0
        assert row["logged_us"] > row["unlogged_us"]
        assert row["background_us"] > 0


def test_tensor_compares_with_the_limit_and_with_tensorboard(json_file: Path) -> None:
    results = run("tensor", json_file, "--sizes", "100000")["results"]
    works = {row["work"] for row in results["float32"]}
    assert {"add", "reduce", "x.sum()", "make_histogram"} <= works
    assert len(results) == 5
    for rows in results.values():
        assert rows
        assert all(len(row["rounds"]) == 1 for row in rows)


def test_ranks_has_a_row_for_each_number_of_ranks(json_file: Path) -> None:
    figures = run("ranks", json_file, "--ranks", "3", "12")["figures"]
    assert [cost["ranks"] for cost in figures["costs"]] == [3, 12]
    for cost in figures["costs"]:
        assert cost["full_bytes"] > 100 * cost["light_bytes"] > 0
        assert cost["full_s"] > cost["mean_s_every_10"] > cost["mean_s_every_100"] > 0
    few, many = figures["costs"]
    assert many["full_s"] > few["full_s"]
    assert figures["training_thread_us"] > 0


def test_telling_has_a_time_for_each_channel_of_an_alert(json_file: Path) -> None:
    [row] = run("telling", json_file)["figures"]
    assert row["raised_s"] > 0 < row["read_s"]


def test_gpu_has_all_figures_on_a_cpu(json_file: Path) -> None:
    parts = ("CNN", "bandwidth", "host")
    written = run("gpu", json_file, "--device", "cpu", "--only", *parts)
    assert not written["on_gpu"]
    costs, bandwidth, host = written["figures"].values()
    assert {"bare", "every 1", "every 10", "every 100", "never", "mean, std"} <= set(costs)
    assert costs["bare"]["added"] == 0
    assert all(cost["written_ms"] >= cost["trained_ms"] > 0 for cost in costs.values())
    every, tenth, hundredth = (costs[f"every {n}"] for n in (1, 10, 100))
    assert every["full_steps"] == every["steps"] > tenth["full_steps"] > 1
    assert hundredth["steps"] > 100 > hundredth["full_steps"] > 1
    assert len({(row["dtype"], row["layout"]) for row in bandwidth}) == 3 * 6
    assert all(len(row["shares"]) == 5 and min(row["shares"].values()) > 0 for row in bandwidth)
    assert host["output_us"] > 0

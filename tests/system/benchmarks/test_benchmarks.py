"""Each benchmark runs, prints its hardware and versions, and writes the promised rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.paths import ROOT

ARGUMENTS = {
    # First: multiprocessing takes the module that imports it for the main one.
    "scaling": ["--modules", "50"],
    "overhead": ["--only", "MNIST", "--threads", "1", "--markdown"],
    "norms": ["--only", "MNIST"],
    "loops": ["--only", "MLP"],
    "dashboard": ["--sizes", "50x50"],
    "tensor": ["--sizes", "100000"],
    "ranks": ["--ranks", "12"],
    "telling": [],
    "gpu": ["--device", "cpu", "--only", "CNN", "bandwidth", "host"],
}

# With these a benchmark does not start itself again.
MALLOC = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
# One process imports everything once.
RUN_ALL = """
import contextlib, json, runpy, sys, traceback

sys.path.insert(0, "benchmarks")
folder, arguments = sys.argv[1], json.loads(sys.argv[2])
for name, more in arguments.items():
    sys.argv = [name, "--quick", "--json", f"{folder}/{name}.json", *more]
    with open(f"{folder}/{name}.txt", "w") as printed, contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(f"benchmarks/{name}.py", run_name="__main__")
        except Exception:
            traceback.print_exc(file=printed)
"""

Results = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def results_of(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Function that returns the rows of a benchmark with ``--quick``."""
    folder = tmp_path_factory.mktemp("figures")
    subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(folder), json.dumps(ARGUMENTS)],
        cwd=ROOT,
        env={**os.environ, **MALLOC},
        check=True,
    )

    def results_of(name: str) -> dict[str, Any]:
        printed, written = (folder / f"{name}.{kind}" for kind in ("txt", "json"))
        text = printed.read_text(encoding="utf-8")
        assert written.exists(), text
        results: dict[str, Any] = json.loads(written.read_text(encoding="utf-8"))
        assert results["machine"] in text
        assert results["cores"] == os.cpu_count()
        for library in ("Python", "telemetry", "torch", "tensorboard"):
            assert f"{library} {results['versions'][library]}" in results["machine"]
        return results

    return results_of


def test_overhead_compares_every_recording_with_bare_training(results_of: Results) -> None:
    (costs,) = results_of("overhead")["figures"].values()
    ours = {"only norms", "every step", "same, no images", "same as wandb"}
    assert {"bare", "add_histogram", "every 10 steps", "every 100 steps", *ours} <= set(costs)
    assert costs["bare"]["added"] == 0
    assert all(cost["wall_ms"] > 0 for cost in costs.values())
    # The one difference that no noise hides.
    assert costs["add_histogram"]["cpu_added"] > costs["only norms"]["cpu_added"]
    mean = (9 * costs["only norms"]["wall_ms"] + costs["every step"]["wall_ms"]) / 10
    assert costs["every 10 steps"]["wall_ms"] == pytest.approx(mean)


def test_norms_measures_the_cost_of_a_light_step(results_of: Results) -> None:
    (cost,) = results_of("norms")["figures"].values()
    assert cost["parameters"] == 8
    assert cost["later_ms"] > 0
    assert cost["step_ms"] > cost["later_ms"]


def test_loops_have_a_row_for_each_default(results_of: Results) -> None:
    (costs,) = results_of("loops")["figures"].values()
    assert {"bare", "default", "alerts=()", "max_overhead=0.01"} <= set(costs)
    assert costs["bare"]["added"] == 0
    assert costs["default"]["full"] >= 1


def test_dashboard_has_a_time_for_each_request_of_the_page(results_of: Results) -> None:
    (row,) = results_of("dashboard")["figures"]
    assert (row["layers"], row["steps"]) == (50, 50)
    requested = {"start_s", "cold_ms", "warm_ms", "cell_ms", "scalars_s", "histograms_s"}
    drawn = {"page_s", "redraw_ms"} & set(row)  # where there is Chromium
    assert all(row[name] > 0 for name in requested | drawn)
    assert row["wire_kb"] * 1000 > 50 * 50 * 4 / 2  # the picture's numbers, hardly compressible


def test_scaling_has_a_row_for_each_size(results_of: Results) -> None:
    [row] = results_of("scaling")["figures"]
    assert row["modules"] == 50
    assert row["bare_us"] > 0
    assert row["logged_us"] > row["unlogged_us"]
    assert row["background_us"] > 0


def test_tensor_compares_with_the_limit_and_with_tensorboard(results_of: Results) -> None:
    results = results_of("tensor")["results"]
    works = {row["work"] for row in results["float32"]}
    assert {"add", "reduce", "x.sum()", "make_histogram"} <= works
    assert len(results) == 5
    for rows in results.values():
        assert rows
        assert all(len(row["rounds"]) == 1 for row in rows)


def test_ranks_has_a_row_for_each_number_of_ranks(results_of: Results) -> None:
    figures = results_of("ranks")["figures"]
    [cost] = figures["costs"]
    assert cost["ranks"] == 12
    assert cost["full_bytes"] > 100 * cost["light_bytes"] > 0
    assert cost["full_s"] > cost["mean_s_every_10"] > cost["mean_s_every_100"] > 0
    assert figures["training_thread_us"] > 0


def test_telling_has_a_time_for_each_channel_of_an_alert(results_of: Results) -> None:
    [row] = results_of("telling")["figures"]
    assert row["raised_s"] > 0 < row["read_s"]


def test_gpu_has_all_figures_on_a_cpu(results_of: Results) -> None:
    written = results_of("gpu")
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

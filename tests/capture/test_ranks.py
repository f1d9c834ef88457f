"""Training on two ranks: nobody waits for the logger, and each rank logs what it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]


CASES = ["ddp/before", "ddp_with_accumulation/after", "fsdp/before", "fsdp/after", "fsdp/rank 0"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes saw of bare and watched runs, by case."""
    folder = tmp_path_factory.mktemp("ranks")
    script = TESTS / "capture" / "ranks.py"
    path = ":".join(map(str, (TESTS.parent, TESTS)))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), *CASES],
            env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PATH": os.environ["PATH"]},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, told in zip(processes, errors, strict=True):
        assert process.returncode == 0, told
        assert "telemetry failed" not in told
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("case", CASES)
def test_ranks_are_left_alone_and_log_what_they_hold(
    ranks: list[dict[str, Any]], case: str
) -> None:
    calls = 2 if "accumulation" in case else 1
    for rank, results in enumerate(ranks):
        bare, watched = results[case]["bare"], results[case]["watched"]
        for key in ("parameters", "random", "norms_before_clipping", "second_moments"):
            assert bare[key] == watched[key]
        if case.endswith("rank 0") and rank == 1:
            continue
        records = watched["records"]
        assert [record["step"] for record in records] == [0, 1, 2]
        for record in (records[0], records[2]):
            assert record["names"] == ["0.weight", "0.bias", "2.weight", "2.bias"]
            assert record["activations"] == dict.fromkeys("012", calls)
            assert record["activation_counts"]["2"] == calls * 5 * 2
            assert record["activation_grads"] == dict.fromkeys("012", calls)
            assert list(record["weights"].values()) == list(map(len, watched["parameters"]))
            assert all(record["update_ratios"].values())
            moments = watched["second_moments"][record["step"]]
            assert list(record["second_moments"].values()) == pytest.approx(moments, rel=1e-5)
            if case in ("fsdp/before", "fsdp/rank 0") and record["step"] == 0:
                continue  # the parameters were replaced after the step had begun
            expected = watched["norms_before_clipping"][record["step"]]
            assert record["before_clipping"] == pytest.approx(expected, rel=1e-5)

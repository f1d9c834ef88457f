"""Only one of several processes logs and writes, with every launcher."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from telemetry.ranks.role import is_rank_0, rank_and_world_size
from tests.helpers.paths import ROOT

SCRIPT = ROOT / "tests" / "helpers" / "launched.py"
VARIABLES = [
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NTASKS"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "WORLD_SIZE"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "JSM_NAMESPACE_RANK",
]


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"RANK": "0", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, True),  # torchrun under srun
        ({"RANK": "3", "LOCAL_RANK": "0"}, False),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, True),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, False),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "LOCAL_RANK": "1"}, False),  # no srun
        ({"OMPI_COMM_WORLD_RANK": "1"}, False),
        ({"PMI_RANK": "1"}, False),
        ({"PMIX_RANK": "1"}, False),
        ({"MV2_COMM_WORLD_RANK": "1"}, False),
        ({"JSM_NAMESPACE_RANK": "1"}, False),
        ({"RANK": "", "PMI_RANK": "none"}, True),
    ],
)
def test_the_launchers_variables_give_the_rank_before_a_process_group_exists(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], first: bool
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_rank_0() is first


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"RANK": "3", "WORLD_SIZE": "8", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, (3, 8)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({"LOCAL_RANK": "1", "WORLD_SIZE": "2"}, None),  # Lightning makes the group later
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8"}, (5, 8)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 4)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2)),
        ({"RANK": "4", "WORLD_SIZE": "four"}, None),
    ],
)
def test_the_launchers_variables_give_the_number_of_ranks(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: tuple[int, int] | None
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == expected


def launch(*command: str) -> str:
    """Return stderr and stdout of two processes."""
    environment = {n: value for n, value in os.environ.items() if n not in VARIABLES}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stderr + done.stdout


def assert_logged_once(output: str, log_dir: Path) -> None:
    assert output.count("tensorboard --logdir") == 1, output
    assert output.count("nonfinite") == 1, output
    assert output.count("flight-3.json") == 1, output
    lines = (log_dir / "alerts.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["nonfinite"]
    assert len(list(log_dir.glob("events.out.*"))) == 1, "the first rank writes for all"


def test_one_process_of_mp_spawn_writes_and_logs(tmp_path: Path) -> None:
    output = launch(str(SCRIPT), "spawn", str(tmp_path / "run"))
    assert_logged_once(output, tmp_path / "run")
    assert (tmp_path / "run-0").read_text() == "True True"
    assert (tmp_path / "run-1").read_text() == "True False"


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_one_process_of_lightning_writes_and_logs(tmp_path: Path) -> None:
    output = launch(str(SCRIPT), "lightning", str(tmp_path / "run"))
    assert_logged_once(output, tmp_path / "run")

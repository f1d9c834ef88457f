"""Only one of several processes logs and writes one run, with every launcher."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from tensorboard.util.tensor_util import make_ndarray

import telemetry
from telemetry import HookLogger
from tests.helpers import launched
from tests.helpers.frameworks import AlertFrom, mlp
from tests.helpers.loops import load
from tests.helpers.scripts import TORCHRUN, run_script

VARIABLES = [
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_NTASKS"),
    *("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "WORLD_SIZE"),
    *("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"),
    "JSM_NAMESPACE_RANK",
]


@pytest.mark.parametrize(
    ("variables", "folder", "logs"),
    [
        ("", "", True),
        ("RANK=3 WORLD_SIZE=8 SLURM_PROCID=0 SLURM_NTASKS=2", "rank-0003", False),  # under srun
        ("RANK=0 WORLD_SIZE=8 SLURM_PROCID=3 SLURM_NTASKS=4", "rank-0000", True),
        ("RANK=0 WORLD_SIZE=1", "", True),
        ("RANK=3 LOCAL_RANK=0", None, False),
        ("RANK=4 WORLD_SIZE=four", None, False),
        ("RANK= PMI_RANK=none", "", True),
        ("LOCAL_RANK=1 WORLD_SIZE=2", None, False),  # Lightning forms the group later
        ("LOCAL_RANK=0 NODE_RANK=0 WORLD_SIZE=2", "", True),
        ("LOCAL_RANK=0 NODE_RANK=1", None, False),
        ("SLURM_PROCID=0 SLURM_NTASKS=8", "rank-0000", True),
        ("SLURM_PROCID=5 SLURM_NTASKS=8", "rank-0005", False),
        ("SLURM_PROCID=0 SLURM_NTASKS=1", "", True),
        ("SLURM_PROCID=5 SLURM_NTASKS=1", "", True),
        ("SLURM_PROCID=0 SLURM_NTASKS=2 LOCAL_RANK=1", None, False),  # without srun
        ("OMPI_COMM_WORLD_RANK=1", None, False),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", "rank-0001", False),
        ("PMI_RANK=1", None, False),
        ("PMI_RANK=1 PMI_SIZE=2", "rank-0001", False),
        ("PMIX_RANK=1", None, False),
        ("MV2_COMM_WORLD_RANK=1", None, False),
        ("MV2_COMM_WORLD_RANK=1 MV2_COMM_WORLD_SIZE=2", "rank-0001", False),
        ("JSM_NAMESPACE_RANK=1", None, False),
    ],
)
def test_the_launchers_variables_give_the_rank_before_a_process_group_exists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variables: str,
    folder: str | None,
    logs: bool,
) -> None:
    """Each rank writes into its own folder, if it is known, and only rank 0 logs alerts."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    model = mlp()
    if folder is None:
        with pytest.raises(ValueError, match="does not know its rank"):
            HookLogger(model, tmp_path, ranks="each")
    else:
        with HookLogger(model, tmp_path, ranks="each", alerts=[AlertFrom(0)]):
            model(torch.ones(1, 4)).sum().backward()
            torch.optim.SGD(model.parameters()).step()
        [events] = tmp_path.rglob("events.out.*")
        assert events.parent == tmp_path / folder
        assert ("stop here" in caplog.text) == logs


SCRIPT = Path(launched.__file__)


def launch(folder: Path, script: str, *arguments: object) -> str:
    """Return stderr and stdout of two processes."""
    environment = {n: value for n, value in os.environ.items() if n not in VARIABLES}
    return "".join(run_script(folder, script, *arguments, env=environment))


def assert_logged_once(output: str, log_dir: Path) -> None:
    assert output.count("tensorboard --logdir") == 1, output
    assert output.count("nonfinite") == 1, output
    assert [alert.kind for alert in telemetry.read(log_dir).alerts] == ["nonfinite"]
    assert len(list(log_dir.glob("*.runlog"))) == 1
    assert len(list(log_dir.glob("events.out.*"))) == 1, "the first rank writes for all"


def test_one_process_of_mp_spawn_writes_and_logs(tmp_path: Path) -> None:
    output = launch(tmp_path, SCRIPT.read_text(), "spawn", tmp_path / "run")
    assert_logged_once(output, tmp_path / "run")


@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning")
def test_one_process_of_lightning_writes_and_logs(tmp_path: Path) -> None:
    output = launch(tmp_path, SCRIPT.read_text(), "lightning", tmp_path / "run")
    assert_logged_once(output, tmp_path / "run")


def test_a_restart_by_torchrun_continues_each_curve(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--standalone", "--max-restarts=1")
    output = launch(tmp_path, TORCHRUN, *options, SCRIPT, "torchrun", tmp_path)
    assert output.count("tensorboard --logdir") == 2, "one rank speaks for all, at each attempt"
    assert "telemetry failed" not in output
    assert "the records hold" not in output
    events = load(tmp_path)
    assert len(list(tmp_path.glob("events.out.*"))) == 2
    for tag in ("loss", "grad_norm/total"):
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == list(range(2 * launched.RESTARTED_STEPS))
    # With inputs and activations of both ranks.
    sizes = {"model input": 16, "model input.0": 8, "model input.1": 8, "0": 16}
    for name, size in sizes.items():
        found = events.Tensors(f"activation/0000.{name}")
        assert {make_ndarray(event.tensor_proto)[:, 2].sum() for event in found} == {size}, name

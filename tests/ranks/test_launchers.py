"""The exchange between ranks works under each launcher, and again after an elastic restart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("launched_channel.py")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")


@pytest.mark.parametrize(
    ("launcher", "attempts"),
    [((), 1), ((*TORCHRUN, "--max-restarts=0"), 1), ((*TORCHRUN, "--max-restarts=1"), 2)],
    ids=["mp.spawn", "torchrun", "torchrun with a restart"],
)
def test_two_processes_exchange_their_steps(
    tmp_path: Path, launcher: tuple[str, ...], attempts: int
) -> None:
    path = os.pathsep.join(map(str, [SCRIPT.parents[2], SCRIPT.parent]))
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.glob("attempt-*")) == [
        f"attempt-{n}" for n in range(attempts)
    ]
    assert "telemetry" not in done.stderr.replace(str(SCRIPT), "")

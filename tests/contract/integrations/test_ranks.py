"""Two ranks train by a trainer: they write one run, and an alert stops both at the same step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.frameworks import curve
from tests.helpers.paths import ROOT

SCRIPT = Path(__file__).with_name("trainers_on_ranks.py")


def test_two_ranks_write_one_run_and_stop_at_the_same_step(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
         "--max-restarts=0", str(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in range(2))
    assert first == second
    for name, steps in zip(["lightning", "huggingface"], map(int, first.split()), strict=True):
        assert 3 < steps < 50_000
        [run] = {path.parent for path in (tmp_path / name).rglob("*tfevents*")}
        assert sorted(curve(run, "grad_norm/total")) == list(range(steps))
        assert sorted(curve(run, "loss")) == list(range(steps))
    assert "telemetry failed" not in done.stderr

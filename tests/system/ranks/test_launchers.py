"""A run of several ranks continues as one curve after torchrun has restarted them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tensorboard.util.tensor_util import make_ndarray

from tests.helpers import restarted_run
from tests.helpers.paths import ROOT
from tests.helpers.plain_events import EventAccumulator

SCRIPT = Path(restarted_run.__file__)


def test_a_restart_by_torchrun_continues_each_curve(tmp_path: Path) -> None:
    launcher = ("torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=1")
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tensorboard --logdir") == 2, (
        "one rank speaks for all, at each attempt"
    )
    assert "telemetry failed" not in done.stderr
    assert "the records hold" not in done.stderr
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    events.Reload()
    assert len(list(tmp_path.glob("events.out.*"))) == 2
    for tag in ("loss", "grad_norm/total"):
        steps = [event.step for event in events.Scalars(tag)]
        assert steps == list(range(2 * restarted_run.STEPS))
    # With activations of both ranks.
    (found,) = (events.Tensors(t) for t in events.Tags()["tensors"] if t.startswith("activation/"))
    assert {make_ndarray(event.tensor_proto)[:, 2].sum() for event in found} == {16}

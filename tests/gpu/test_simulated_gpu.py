"""Streams and copies of GPU tensors, on a simulated GPU in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.helpers.paths import ROOT


def test_no_case_on_a_simulated_gpu_synchronizes_or_races() -> None:
    # The device is registered for the whole process.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/gpu/simulated_gpu_cases.py"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

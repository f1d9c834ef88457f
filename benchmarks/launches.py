"""The training thread's time for a tensor on a GPU, and in hooks: the driver is a stub, no GPU.

    python benchmarks/launches.py

The driver itself adds 2 to 3 microseconds for a launch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median

import pytest
import torch
from gpu import measure_host
from machine import describe_machine

from telemetry.measure import Measurer, cuda, native

CALLS = 500
ROUNDS = 9


def microseconds(call: Callable[[Measurer], object], calls: int) -> float:
    """Median over rounds of the time of one call."""
    times = []
    for _ in range(ROUNDS):
        measurer = Measurer()
        call(measurer)
        begin = time.perf_counter()
        for _ in range(calls):
            call(measurer)
        times.append((time.perf_counter() - begin) / calls)
        measurer.finish()
    return median(times) * 1e6


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    stubbed = import_module("tests.helpers.stubbed")
    stream = import_module("tests.helpers.simulated_gpu").default_stream
    with pytest.MonkeyPatch.context() as patches, tempfile.TemporaryDirectory() as folder:
        driver = stubbed.install(patches, Path(folder), types=native.TYPES)
        driver.idle = 1
        # All tensors are in the stub's memory, and PyTorch receives the same calls as on a GPU.
        patches.setattr(torch.Tensor, "is_cuda", True)
        patches.setattr(torch.Tensor, "is_cpu", False)
        patches.setattr(torch.Tensor, "get_device", lambda tensor: 0)
        patches.setattr(
            cuda, "_device_memory", lambda size, index: torch.zeros(size // 8, dtype=torch.int64)
        )
        patches.setattr(cuda, "current_stream", lambda device: stream)
        patches.setattr(cuda, "raw_stream", lambda index: stream.cuda_stream)
        patches.setattr(torch.cuda, "is_initialized", lambda: True)
        tensor, many = torch.rand(8, 8), [torch.rand(30) for _ in range(148)]
        print(describe_machine(torch.device("cpu")))
        plain = microseconds(lambda measurer: measurer.add(tensor), CALLS)
        units = microseconds(lambda measurer: measurer.add(tensor, unit_axis=1), CALLS)
        weights = microseconds(lambda measurer: measurer.add_all(many, powers=2), 3)
        norms = microseconds(lambda measurer: cuda.norms(many), 20)
        print(f"a tensor {plain:.1f} us, with units {units:.1f} us")
        print(f"{len(many)} tensors at once {weights:.0f} us, their norms {norms:.0f} us")
        torch.set_num_threads(1)
        measure_host(torch.device("cpu"), 300)


if __name__ == "__main__":
    main()

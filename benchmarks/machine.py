"""Describes the machine of a benchmark, and keeps chance out of its memory."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

# The code next to this file, installed or not.
sys.path.insert(0, str(Path(__file__).parents[1]))

import telemetry

LIBRARIES = ("tensorboard", "numpy", "wandb", "pytorch-ignite", "mosaicml")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hardware and versions of the software; libraries that are not installed are omitted.

    Attributes:
        processor: The processor's name.
        cores: Number of cores of the system.
        accelerator: Its name in torch; None if the benchmark uses none.
        torch_threads: Number of threads that torch may use for one operation.
        versions: Versions of Python and of libraries, by name.
    """

    processor: str
    cores: int | None
    accelerator: str | None
    torch_threads: int
    versions: dict[str, str]

    def __str__(self) -> str:
        accelerator = f", {self.accelerator}" if self.accelerator else ""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.processor} ({self.cores} cores){accelerator}, "
            f"{self.torch_threads} torch threads, {versions}"
        )


def this_machine(device: torch.device) -> Machine:
    return Machine(
        processor=_processor(),
        cores=os.cpu_count(),
        accelerator=torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        torch_threads=torch.get_num_threads(),
        versions={
            "Python": platform.python_version(),
            "telemetry": telemetry.__version__,
            "torch": torch.__version__,
            **{name: found for name in LIBRARIES if (found := _version(name))},
        },
    )


def describe_machine(device: torch.device) -> str:
    return str(this_machine(device))


def write_json(path: Path, device: torch.device, **results: Any) -> None:
    """The results, with the machine as the line that is printed and as fields."""
    machine = this_machine(device)
    content = {"machine": str(machine), **asdict(machine), **results}
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")


def _processor() -> str:
    """The processor's name; without one, its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def keep_freed_memory() -> None:
    """Start this program again with a glibc that does not return freed memory to the system.

    It does so by chance, after one variant and not another; the page faults then take up to a third
    of a step.
    """
    settings = {"MALLOC_TRIM_THRESHOLD_": str(2**30), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
    if sys.platform == "linux" and not os.environ.keys() >= settings.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **settings})

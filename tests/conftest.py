"""What all tests share: steady Hypothesis runs, one torch thread, real MNIST, disks that fail."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from disks import FreezableDisk

hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
# For what is run a second time in another way.
hypothesis.settings.register_profile(
    "brief", hypothesis.settings.get_profile("steady"), max_examples=15
)
hypothesis.settings.load_profile("steady")
torch.set_num_threads(1)
# A warning that PyTorch gives once per process would come in whichever test is first.
torch.set_warn_always(True)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: one more than cores, as many tests wait for other processes and disks."""
    return (os.cpu_count() or 1) + 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture
def mnist_dir() -> Path:
    """Folder to give to ``torchvision.datasets.MNIST``: 8,000 training and 2,000 test images."""
    folder = Path(__file__).parents[2] / "shared" / "mnist"
    if not folder.is_dir():
        pytest.skip(f"no MNIST images in {folder}")
    return folder


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    _run_or_skip("mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk))
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.fixture
def freezable_disk(tmp_path: Path) -> Iterator[FreezableDisk]:
    """An ext4 of 8 MB in a file."""
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(8 << 20)
    _run_or_skip("mkfs.ext4", "-q", str(image))
    _run_or_skip("mount", "-o", "loop", str(image), str(disk))
    try:
        if not shutil.which("fsfreeze"):
            pytest.skip("no fsfreeze on this system")
        yield FreezableDisk(disk)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def _run_or_skip(*command: str) -> None:
    if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{command[0]} does not work here: no right to mount a file system")

"""Fixtures of all tests: steady Hypothesis runs, one torch thread, real MNIST, failing disks."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from torch import distributed

from tests.helpers.board import Board, ReadBoard, loader
from tests.helpers.disks import FreezableDisk
from tests.helpers.paths import ROOT, SHARED

hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
# For tests that run a second time in another way.
hypothesis.settings.register_profile(
    "brief", hypothesis.settings.get_profile("steady"), max_examples=15
)
hypothesis.settings.load_profile("steady")
torch.set_num_threads(1)
# Processes that tests start import this checkout, and have one thread, too.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["PYTHONPATH"] = str(ROOT)
# A background job of a shell ignores Ctrl-C, and so would these processes.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# A warning that PyTorch gives once per process would come in whichever test is first.
torch.set_warn_always(True)


SLOW = [
    *("system", "gpu", "contract/integrations", "contract/tensorboard_plugin"),
    *(f"contract/capture/test_{name}.py" for name in ("compile", "programs", "torch_private")),
]
"""Folders and files whose tests are all slow; the compiler takes seconds to be imported."""


def _is_slow(path: Path) -> bool:
    here = Path(__file__).parent
    return any(path.is_relative_to(here / folder) for folder in SLOW)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _is_slow(item.path):
            item.add_marker(pytest.mark.slow)
    # Files with slow tests come first, so that short ones fill the gaps at the end.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no slow test, nor the frameworks that it needs, where none is selected."""
    return (config.option.markexpr == "not slow" and _is_slow(collection_path)) or None


def pytest_collection_finish() -> None:
    """Exclude what was imported from garbage collection, which otherwise takes 0.2 s each time."""
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Distribute files in the order of collection."""
    config.option.loadscopereorder = False


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """For ``-n auto``: one more than cores, as some tests wait for processes and disks."""
    return 1 + (os.cpu_count() or 1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were skipped for which reasons, in one line."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        counts = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {counts}")


@pytest.fixture
def mnist_dir() -> Path:
    """Folder to give to ``torchvision.datasets.MNIST``: 8,000 training and 2,000 test images."""
    folder = SHARED / "mnist"
    if not folder.is_dir():
        pytest.skip(f"no MNIST images in {folder}")
    return folder


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The test's directory, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def process_group() -> Iterator[None]:
    """Process group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


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


@pytest.fixture(params=["slow", "fast"])
def read_board(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ReadBoard]:
    """Opens a log directory as TensorBoard would; runs the test once with each loader."""
    with loader(request.param, tmp_path_factory) as open_with:
        yield lambda logdir: Board(open_with(logdir))


def _run_or_skip(*command: str) -> None:
    if not shutil.which(command[0]) or subprocess.run(command, capture_output=True).returncode:
        pytest.skip(f"{command[0]} does not work here: no right to mount a file system")

"""What all tests share: steady Hypothesis runs, one torch thread, real MNIST where it is there."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("steady", derandomize=True, deadline=None)
hypothesis.settings.load_profile("steady")
torch.set_num_threads(1)
# A warning that PyTorch gives once per process would come in whichever test is first.
torch.set_warn_always(True)


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

"""Skips of tests that need a newer PyTorch."""

from __future__ import annotations

import pkgutil
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

from telemetry.measure import native

GRAPHS_CAN_BE_OBSERVED = TorchVersion(torch.__version__) >= "2.13"


def require(name: str) -> Any:
    """Return PyTorch's object of a dotted name, ``torch.int4``, or skip the test."""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        pytest.skip(f"PyTorch {torch.__version__} has no {name}")


needs_tensor_reader = pytest.mark.skipif(
    native.TENSORS is None,
    reason="needs the C extension, and PyTorch's DLPack exchange API to read tensor objects",
)

needs_observable_graphs = pytest.mark.skipif(
    not GRAPHS_CAN_BE_OBSERVED, reason="compiled modules can be observed since PyTorch 2.13"
)

"""Measures tensors during training: exact moments, histograms, and extremes of each unit.

:mod:`measurer` takes the tensors of a step. :mod:`tensors` says which values of a tensor to measure
and how they lie in memory. :mod:`native` (CPU: the C extension, or NumPy), :mod:`cuda` (NVIDIA
GPUs) or :mod:`device` (accelerators: PyTorch's operations) reads them.
"""

from __future__ import annotations

from telemetry.measure.measurer import Measurements, Measurer
from telemetry.measure.tensors import block_sample, fingerprint

__all__ = [
    "Measurements",
    "Measurer",
    "block_sample",
    "fingerprint",
]

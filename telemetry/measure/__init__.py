"""Tensors to numbers: exact moments, histograms and extremes of units, cheap while training.

A tensor travels one way: :mod:`tensors` says which values it has and how they lie in memory.
:mod:`host` (CPU: :mod:`native`, or NumPy) or :mod:`device` (accelerators) reads them.
:mod:`measurer` keeps the order.
"""

from __future__ import annotations

from telemetry.measure.measurer import Measurements, Measurer
from telemetry.measure.sampling import block_sample

__all__ = ["Measurements", "Measurer", "block_sample"]

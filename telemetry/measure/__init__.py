"""Tensors to numbers: exact moments, histograms and extremes of units, cheap while training.

A tensor travels one way: :mod:`tensors` says which values it has and how they lie in memory.
:mod:`small` and :mod:`large` (CPU) or :mod:`device` (accelerators) reduce them, with the parts in
:mod:`moments`, :mod:`sampling` and :mod:`blocks`. :mod:`measurer` keeps the order.
"""

from __future__ import annotations

from telemetry.measure.measurer import Measurements, Measurer
from telemetry.measure.sampling import block_sample

__all__ = ["Measurements", "Measurer", "block_sample"]

"""Measures tensors during training: exact moments, histograms, and extremes of each unit.

:mod:`measurements` takes the tensors of a step. :mod:`tensors` says which values of a tensor to
measure and how they lie in memory. :mod:`native` (CPU: the C extension, or NumPy) or :mod:`device`
(accelerators: PyTorch's operations, and a sample for :mod:`native`) reads them.
"""

from telemetry.measure.measurements import Measurements as Measurements
from telemetry.measure.tensors import block_sample as block_sample
from telemetry.measure.tensors import fingerprint as fingerprint

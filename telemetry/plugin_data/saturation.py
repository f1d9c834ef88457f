"""Share of an activation function's outputs where hardly any gradient comes through.

An output counts as saturated where the function's slope is at most about a quarter of its largest.
Four such functions in a row pass less than 1 % of a gradient. In terms of the output ``y``:

==============  ==================  ======================  ===============================
module          slope               saturated               slope there, relative to the top
==============  ==================  ======================  ===============================
Sigmoid         y (1 − y)           y < 1/16, y ≥ 15/16     15/64 or less
Tanh            1 − y²              |y| ≥ 7/8               15/64 or less
Softsign        (1 − |y|)²          |y| ≥ 1/2               1/4 or less
Hardsigmoid     1/6, 0 at both ends y = 0, y = 1            0
ReLU6           1, 0 at both ends   y = 0, y = 6            0
==============  ==================  ======================  ===============================

Tanh is Sigmoid stretched, ``tanh(x) = 2 sigmoid(2 x) − 1``, and both rows say the same of ``x``.
All limits are edges of the sketch's buckets, so nothing is interpolated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from telemetry.sketch import Sketch, bucket_indices

_BucketTest = Callable[[NDArray[np.int16]], NDArray[np.bool_]]


def _bucket(value: float) -> int:
    return int(bucket_indices(np.array([value]))[0])


_SIXTEENTH, _HALF, _SEVEN_EIGHTHS = _bucket(1 / 16), _bucket(1 / 2), _bucket(7 / 8)
_FIFTEEN_SIXTEENTHS, _ONE, _SIX = _bucket(15 / 16), _bucket(1.0), _bucket(6.0)

_SATURATED: Mapping[str, _BucketTest] = {
    "Sigmoid": lambda bucket: (bucket < _SIXTEENTH) | (bucket >= _FIFTEEN_SIXTEENTHS),
    "Tanh": lambda bucket: np.abs(bucket) >= _SEVEN_EIGHTHS,
    "Softsign": lambda bucket: np.abs(bucket) >= _HALF,
    "Hardsigmoid": lambda bucket: (bucket <= 0) | (bucket >= _ONE),
    "ReLU6": lambda bucket: (bucket <= 0) | (bucket >= _SIX),
}


def saturation(type_name: str, outputs: Sketch) -> float | None:
    """Saturated share of the finite outputs of a module; None if its class is not in the table.

    Args:
        type_name: Name of the module's class.
        outputs: All its outputs at one step.
    """
    is_saturated = _SATURATED.get(type_name)
    if is_saturated is None or not outputs.finite_count:
        return None
    return float(outputs.counts[is_saturated(outputs.buckets)].sum() / outputs.finite_count)

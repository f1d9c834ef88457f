"""Exact moments of a tensor's values: counts, extremes and sums of powers.

The formulas take a :class:`~telemetry.records.sketch.Sketch` of one tensor, or columns over many
tensors, such as :class:`~telemetry.records.rows.Rows`. They return float64 of the same shape: NaN
where there is no finite value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import nan
from typing import Any, TypeVar

import numpy as np

# Fields of a sketch, by the reduction that merges two tensors.
COUNTS = ("count", "nan_count", "positive_inf_count", "negative_inf_count", "zero_count")
EXTREMES = ("min", "max")
POWER_SUMS = ("sum", "sum_squares", "sum_cubes", "sum_fourth_powers")
MOMENTS = (*COUNTS, *EXTREMES, *POWER_SUMS)

# Beyond this many standard deviations from zero, rounding of the fourth powers' sum (1e-16 of it)
# reaches 1e-4 of the central moment.
_FARTHEST_MEAN = 1000

Argument = TypeVar("Argument")
Value = TypeVar("Value")


def once(of: Callable[[Argument], Value]) -> Callable[[Argument], Value]:
    """Cache a function of one object in that object; NumPy does not warn."""
    name, evaluate = f"{of.__module__}.{of.__qualname__}", np.errstate(all="ignore")(of)

    @wraps(of)
    def value(argument: Argument) -> Value:
        known: dict[str, Value] = vars(argument)
        if name not in known:
            known[name] = evaluate(argument)
        return known[name]

    return value


@once
def nonfinite_of(x: Any) -> Any:
    """Return the number of values that are NaN or infinite."""
    return x.nan_count + x.positive_inf_count + x.negative_inf_count


@once
def finite_of(x: Any) -> Any:
    """Return the number of finite values."""
    return x.count - x.nan_count - x.positive_inf_count - x.negative_inf_count


@once
def mean_of(x: Any) -> Any:
    """Return the mean of the finite values."""
    return np.divide(x.sum, finite_of(x))


@once
def rms_of(x: Any) -> Any:
    """Return the root mean square of the finite values."""
    return np.sqrt(np.divide(x.sum_squares, finite_of(x)))


@once
def std_of(x: Any) -> Any:
    """Return the population standard deviation of the finite values.

    Its relative error is about 1e-16 times the square of ``mean / std``.
    """
    return np.sqrt(np.maximum(np.divide(x.sum_squares, finite_of(x)) - mean_of(x) ** 2, 0.0))


@once
def kurtosis_of(x: Any) -> Any:
    """Return the kurtosis of the finite values: their fourth standardized moment.

    3 for a normal distribution, 1.8 for a uniform one, and at least 1. Its error is about 1e-16
    times the fourth power of ``mean / std``: NaN if that is above 1,000, or if all values are
    equal.
    """
    mean, std, count = mean_of(x), std_of(x), finite_of(x)
    # In units of the standard deviation nothing overflows or vanishes that did not before.
    z = np.divide(mean, std)
    second = np.divide(x.sum_squares, count) / std / std
    third = np.divide(x.sum_cubes, count) / std / std / std
    fourth = np.divide(x.sum_fourth_powers, count) / std / std / std / std
    kurtosis = fourth - 4 * z * third + 6 * z**2 * second - 3 * z**2 * z**2
    return np.where((np.abs(mean) <= _FARTHEST_MEAN * std) & (std > 0), kurtosis, nan)


@once
def norm_of(x: Any) -> Any:
    """Return the Euclidean norm of the finite values; 0 without any."""
    return np.sqrt(x.sum_squares)


@once
def zero_fraction_of(x: Any) -> Any:
    """Return the share of zeros among all values, including NaN and infinity."""
    return np.divide(x.zero_count, x.count)

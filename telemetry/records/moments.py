"""What is known exactly of a tensor's values: counts, extremes and sums of their powers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import fsum, nan, sqrt
from typing import Any, TypeVar

import numpy as np

# The fields of :class:`Moments` by how two tensors' are put together.
COUNTS = ("count", "nan_count", "positive_inf_count", "negative_inf_count", "zero_count")
EXTREMES = ("min", "max")
POWER_SUMS = ("sum", "sum_squares", "sum_cubes", "sum_fourth_powers")

# Beyond this many standard deviations from zero, rounding of the fourth powers' sum (1e-16 of it)
# reaches 1e-4 of what is left when the mean is taken out.
_FARTHEST_MEAN = 1000

_Moments = TypeVar("_Moments", bound="Moments")


@dataclass(frozen=True, kw_only=True, eq=False)
class Moments:
    """Counts, extremes and power sums of some numbers; without arguments, those of none.

    The sums are of the values themselves, not of their distances from the mean: so they add up,
    and what is computed from their differences loses digits where the mean is far from zero.

    Attributes:
        count: All elements, those that are not finite included.
        nan_count: Elements that are NaN.
        positive_inf_count: Elements that are ``+inf``.
        negative_inf_count: Elements that are ``-inf``.
        zero_count: Elements equal to zero, of either sign; exact.
        min: Smallest finite value, NaN if there is none.
        max: Largest finite value, NaN if there is none.
        sum: Sum of the finite values, added up in float64 like the other sums.
        sum_squares: Sum of their squares.
        sum_cubes: Sum of their third powers; NaN if it is not known.
        sum_fourth_powers: Sum of their fourth powers; NaN if it is not known.
    """

    count: int = 0
    nan_count: int = 0
    positive_inf_count: int = 0
    negative_inf_count: int = 0
    zero_count: int = 0
    min: float = nan
    max: float = nan
    sum: float = 0.0
    sum_squares: float = 0.0
    sum_cubes: float = 0.0
    sum_fourth_powers: float = 0.0

    @property
    def nonfinite_count(self) -> int:
        return self.nan_count + self.positive_inf_count + self.negative_inf_count

    @property
    def finite_count(self) -> int:
        # Not by the property above: this is asked for very often.
        return self.count - self.nan_count - self.positive_inf_count - self.negative_inf_count

    @property
    def mean(self) -> float:
        """Mean of the finite values; NaN if there is none."""
        count = self.finite_count
        return self.sum / count if count else nan

    @property
    def rms(self) -> float:
        """Root mean square of the finite values; NaN if there is none."""
        count = self.finite_count
        return sqrt(self.sum_squares / count) if count else nan

    @property
    def std(self) -> float:
        """Population standard deviation of the finite values; NaN if there is none.

        Its relative error is about 1e-16 times the square of ``mean / std``.
        """
        count = self.finite_count
        if not count:
            return nan
        mean = self.sum / count
        return sqrt(max(self.sum_squares / count - mean * mean, 0.0))

    @property
    def kurtosis(self) -> float:
        """How heavy the tails of the finite values are: their fourth standardized moment.

        3 for a normal distribution, 1.8 for a uniform one, and at least 1. Its error is about 1e-16
        times the fourth power of ``mean / std``: NaN if that is above 1,000, if all values are
        equal, or if there is none.
        """
        std, mean, count = self.std, self.mean, self.finite_count
        if not abs(mean) <= _FARTHEST_MEAN * std or std == 0:
            return nan
        # In units of the standard deviation nothing overflows or vanishes that did not before.
        z, z2 = mean / std, (mean / std) ** 2
        second = self.sum_squares / count / std / std
        third = self.sum_cubes / count / std / std / std
        fourth = self.sum_fourth_powers / count / std / std / std / std
        return fourth - 4 * z * third + 6 * z2 * second - 3 * z2 * z2

    @property
    def norm(self) -> float:
        """Euclidean norm of the finite values."""
        return sqrt(self.sum_squares)

    @property
    def zero_fraction(self) -> float:
        """Share of zeros among all elements; NaN if there are no elements."""
        return self.zero_count / self.count if self.count else nan

    def scaled(self: _Moments, factor: float) -> _Moments:
        """The same of the values times a positive, finite factor."""
        powers = {name: factor**power for power, name in enumerate(POWER_SUMS, 1)}
        powers |= dict.fromkeys(EXTREMES, factor)
        return replace(self, **{name: getattr(self, name) * by for name, by in powers.items()})

    @staticmethod
    def total(parts: Sequence[Moments]) -> Moments:
        """The same of all values together, in whatever order the parts come."""
        counts: dict[str, Any] = {name: sum(getattr(p, name) for p in parts) for name in COUNTS}
        sums: dict[str, Any] = {
            name: _sum([getattr(part, name) for part in parts]) for name in POWER_SUMS
        }
        low = float(np.fmin.reduce([part.min for part in parts], initial=nan))
        high = float(np.fmax.reduce([part.max for part in parts], initial=nan))
        return Moments(**counts, **sums, min=low, max=high)


def _sum(parts: list[float]) -> float:
    """The correctly rounded sum, so that the order of merging does not matter."""
    try:
        return fsum(parts)
    except (OverflowError, ValueError):  # beyond float64, or infinities of both signs
        return sum(parts)

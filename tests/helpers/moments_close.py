"""Comparing measurements to the bit, or with sums that were added up in different orders."""

from __future__ import annotations

from dataclasses import fields
from math import sqrt

import numpy as np

from telemetry import TensorRecord
from telemetry.records.moments import COUNTS, POWER_SUMS
from telemetry.records.sketch import Sketch


def assert_moments_close(actual: Sketch, expected: Sketch, *, rtol: float) -> None:
    """Counts and extremes are the same; sums are, up to ``rtol`` of the sum of the magnitudes."""
    for name in COUNTS:
        assert getattr(actual, name) == getattr(expected, name), name
    np.testing.assert_array_equal([actual.min, actual.max], [expected.min, expected.max])
    # By Cauchy and Schwarz these are not below the sums of the magnitudes.
    rms, rms_squares = sqrt(expected.sum_squares), sqrt(expected.sum_fourth_powers)
    sizes = (sqrt(expected.finite_count) * rms, rms * rms, rms * rms_squares, rms_squares**2)
    for name, size in zip(POWER_SUMS, sizes, strict=True):
        got, wanted = getattr(actual, name), getattr(expected, name)
        if np.isfinite(wanted):
            atol = rtol * size if np.isfinite(size) else 0
            np.testing.assert_allclose(got, wanted, rtol=rtol, atol=atol, err_msg=name)
        else:
            assert not np.isfinite(got), name


def assert_same_bits(record: TensorRecord, other: TensorRecord) -> None:
    for field in fields(record.sketch):
        one, two = getattr(record.sketch, field.name), getattr(other.sketch, field.name)
        np.testing.assert_array_equal(one, two, err_msg=field.name)
    np.testing.assert_array_equal(record.unit_min, other.unit_min)
    np.testing.assert_array_equal(record.unit_max, other.unit_max)

"""Robust statistics of a few values."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.history import middle


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1))
def test_the_middle_is_that_of_numpy(values: list[float]) -> None:
    assert middle(values) == np.median(values)

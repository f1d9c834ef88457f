"""Curves drawn with characters."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from telemetry.plain_text import sparkline


def test_a_curve_rises_from_the_lowest_to_the_highest_block() -> None:
    assert sparkline(np.arange(8.0), width=16, log=False) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, 10, 100, 0, np.nan, np.inf], width=16, log=True) == "▁▅█ !!"


def test_long_curves_keep_their_peaks() -> None:
    values = np.ones(1000)
    values[500] = 2
    assert sparkline(values, width=16, log=False).count("█") == 1


@given(st.lists(st.floats(), min_size=1, max_size=60), st.booleans())
def test_any_values_make_a_short_curve(values: list[float], log: bool) -> None:
    assert 1 <= len(sparkline(np.abs(values), width=16, log=log)) <= 16

"""Numbers in messages are written as people write them, and curves are drawn with characters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.plain_text import figure, sparkline


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.00213, 3, "0.00213"),
        (300.0, 2, "300"),
        (-123.0, 1, "-100"),
        (3_712.0, 2, "3,700"),
        (999_999.0, 2, "1,000,000"),
        (2.04e27, 3, "2.04e27"),
        (3e-7, 1, "3e-7"),
        (float("inf"), 3, "inf"),
    ],
)
def test_a_figure_has_an_exponent_only_far_from_one(value: float, digits: int, text: str) -> None:
    assert figure(value, digits) == text


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

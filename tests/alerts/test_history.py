"""Robust statistics of a few values."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.history import Ranked, middle
from telemetry.alerts.memory import restore, to_plain
from telemetry.layers.movers import NORMAL_CONSISTENT

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@given(st.lists(FINITE, min_size=1))
def test_the_middle_is_that_of_numpy(values: list[float]) -> None:
    assert middle(values) == np.median(values)


@given(st.lists(FINITE | st.sampled_from([0.0, 1.0, 2.0]), min_size=1), st.integers(1, 9))
def test_what_is_ranked_is_that_of_the_last_values(values: list[float], length: int) -> None:
    ranked = Ranked(length)
    for value in values:
        ranked.add(value)
    last = sorted(values[-length:])
    half = len(last) // 2
    assert (ranked.lowest, ranked.median, ranked.highest) == (last[0], last[half], last[-1])
    off = sorted(abs(value - last[half]) for value in last)
    assert ranked.deviation == pytest.approx(NORMAL_CONSISTENT * off[half], rel=1e-15)


def test_what_is_restored_is_ranked_anew() -> None:
    used, saved = Ranked(3), Ranked(3)
    for value in (1.0, 2.0, 3.0):
        used.add(value)
        saved.add(10 * value)
    restore(used, to_plain(saved))
    used.add(5.0)
    assert used.ordered == [5.0, 20.0, 30.0]

"""Saturated outputs are those where little gradient comes through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.layers.module_types import BOUNDED
from telemetry.records.sketch import sketch_array

INPUTS = st.lists(st.floats(-12, 12), min_size=1, max_size=50).map(np.array)


def exact_share(outputs: np.ndarray, slopes: np.ndarray, largest: float) -> tuple[float, float]:
    """Shares of outputs surely and perhaps saturated: bfloat16 moves a limit by 0.4 %."""
    relative = slopes / largest
    return float(np.mean(relative < 0.21)), float(np.mean(relative < 0.29))


@given(INPUTS)
def test_tanh_is_saturated_where_its_slope_is_below_a_quarter(x: np.ndarray) -> None:
    y = np.tanh(x)
    low, high = exact_share(y, 1 - y**2, 1.0)
    share = BOUNDED["Tanh"].flat.share(sketch_array(y))
    assert low <= share <= high


@given(INPUTS)
def test_sigmoid_says_the_same_of_its_input_as_tanh(x: np.ndarray) -> None:
    y = 1 / (1 + np.exp(-2 * x))
    low, high = exact_share(y, y * (1 - y), 0.25)
    share = BOUNDED["Sigmoid"].flat.share(sketch_array(y))
    assert low <= share <= high


def test_clipping_functions_are_saturated_at_their_ends_but_not_where_a_relu_is_zero() -> None:
    outputs = sketch_array(np.array([0.0, 0.0, 3.0, 6.0]))
    assert BOUNDED["ReLU6"].flat.share(outputs) == 0.25
    assert BOUNDED["Hardsigmoid"].flat.share(sketch_array(np.array([0.0, 0.5, 0.7, 1.0]))) == 0.5
    assert BOUNDED["Softsign"].flat.share(sketch_array(np.array([-0.9, 0.1, 0.2, 0.6]))) == 0.5


@pytest.mark.parametrize("type_name", ["Linear", "ReLU", "GELU"])
def test_other_modules_have_no_saturation(type_name: str) -> None:
    assert type_name not in BOUNDED


def test_outputs_without_a_finite_value_have_no_saturation() -> None:
    assert BOUNDED["Tanh"].flat.share(sketch_array(np.array([np.nan]))) == 0

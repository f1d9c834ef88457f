"""Outputs are saturated where the slope of the activation is small."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from telemetry.layers.module_types import AFFINE, Flat, saturated_shares
from telemetry.records.rows import Rows
from telemetry.records.sketch import sketch_array

INPUTS = st.lists(st.floats(-12, 12), min_size=1, max_size=50).map(np.array)


def exact_share(outputs: np.ndarray, slopes: np.ndarray, largest: float) -> tuple[float, float]:
    """Return bounds of the saturated share: bfloat16 moves a limit by 0.4 %."""
    relative = slopes / largest
    return float(np.mean(relative < 0.21)), float(np.mean(relative < 0.29))


def shares(**outputs: Any) -> list[float]:
    """The saturated share of each module, by the name of its class."""
    rows = Rows.of([sketch_array(np.asarray(values)) for values in outputs.values()])
    return saturated_shares(list(outputs), rows).tolist()


@given(INPUTS)
def test_tanh_is_saturated_where_its_slope_is_below_a_quarter(x: np.ndarray) -> None:
    y = np.tanh(x)
    low, high = exact_share(y, 1 - y**2, 1.0)
    (share,) = shares(Tanh=y)
    assert low <= share <= high


@given(INPUTS)
def test_sigmoid_and_tanh_agree_on_the_same_input(x: np.ndarray) -> None:
    y = 1 / (1 + np.exp(-2 * x))
    low, high = exact_share(y, y * (1 - y), 0.25)
    (share,) = shares(Sigmoid=y)
    assert low <= share <= high


def test_each_module_type_has_its_own_limits_and_a_relu_none_at_zero() -> None:
    found = shares(
        ReLU6=[0.0, 0.0, 3.0, 6.0],
        Hardsigmoid=[0.0, 0.5, 0.7, 1.0],
        Softsign=[-0.9, 0.1, 0.2, 0.6],
        Hardtanh=[-1.0, -0.7, 0.7, 1.0],
        Tanh=[-0.99, 0.5],
        Linear=[9.0],
        GELU=[6.0, 6.0],
    )
    np.testing.assert_array_equal(found, [0.25, 0.5, 0.5, 0.5, 0.5, np.nan, np.nan])
    assert np.isnan(shares(Tanh=[np.nan])).all()


def test_one_flat_end_is_not_taken_for_two() -> None:
    # In the last buckets, which an end without a limit must not take either.
    sketch = sketch_array(np.array([-3.3e38, -1.0, 2.0, 3.3e38]))
    assert Flat(high=1.0).share(sketch) == 0.5
    assert Flat(low=-2.0).share(sketch) == 0.25
    assert Flat().share(sketch) == 0.0
    assert Flat(low=0.0).share(sketch_array(np.array([np.nan]))) == 0.0


def test_all_convolutions_of_torch_are_affine() -> None:
    known = {name for name, kind in vars(nn).items() if isinstance(kind, type)}
    lazy = {name for name in known if name.startswith("Lazy")}
    assert {name for name in known - lazy if "Conv" in name} <= AFFINE
    assert "Linear" in AFFINE
    assert known >= AFFINE

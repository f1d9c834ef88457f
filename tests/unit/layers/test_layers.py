"""One number per layer and statistic, checked against NumPy on the tensors themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from telemetry import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.layers import PARAMETER_STATISTICS, STATISTICS, table
from telemetry.records.sketch import sketch_array
from telemetry.records.step import RankFacts, Spread

LAYOUT = Layout(
    modules=(Module(name="first", type_name="Linear"), Module(name="act", type_name="Tanh")),
    parameters=(
        Parameter(name="first.weight", module_name="first", shape=(2, 2)),
        Parameter(name="first.bias", module_name="first", shape=(2,)),
    ),
)


def tensor(*values: float, units: Any = None) -> TensorRecord:
    array = np.array(values, dtype=np.float64)
    low, high = (None, None) if units is None else np.array(units, np.float32)
    return TensorRecord(sketch=sketch_array(array), unit_min=low, unit_max=high)


def record(**changes: Any) -> StepRecord:
    values = {"grad_norms": np.array([3.0, 4.0]), "grad_present": np.ones(2, bool)}
    return StepRecord(step=3, layout=LAYOUT, full=True, **values | changes)


def column(measured: StepRecord, name: str) -> list[float | None]:
    """Return a statistic of both layers; None where it was not measured."""
    return [table(measured).value(row, name) for row in range(2)]


def test_an_unknown_column_is_an_error_with_the_closest_ones() -> None:
    with pytest.raises(KeyError, match="no statistic 'grad_nrm'; the closest are grad_norm"):
        table(record()).column("grad_nrm")


FIRST, ACT, ACT1 = Output("first"), Output("act"), Output("act", 1)
WEIGHT, BIAS = "first.weight", "first.bias"
NAN, INF = math.nan, math.inf
NOT_FINITE: dict[str, Any] = {
    "outputs": {FIRST: tensor(1, NAN), ACT: tensor(1, -INF)},
    "weights": {WEIGHT: tensor(1, INF)},
    "update_ratios": {WEIGHT: NAN},
}
ABSENT = {"grad_norms": np.array([3.0, 0.0]), "grad_present": np.array([True, False])}
SPREADS = {
    FIRST: Spread(low=1.0, low_rank=0, high=4.0, high_rank=1),
    ACT: Spread(low=1.0, low_rank=0, high=1.0, high_rank=0),
    ACT1: Spread(low=1.0, low_rank=0, high=2.0, high_rank=1),
}
VECTOR = {WEIGHT: tensor(1, 2, 2, 0), BIAS: tensor(4, 0)}
LONG = {WEIGHT: tensor(3, 4), BIAS: tensor(12)}
UNITS = {
    ACT: tensor(-0.99, 0.1, units=[[0, 0, 1], [0, 0, 1]]),
    FIRST: tensor(2, 0, units=[[0, 1], [0, 1]]),
    ACT1: tensor(0.2, 0.3, units=[[0, -1, 1], [0, 1, 1]]),
}
BOUNDED = {FIRST: tensor(1, 1, units=[[0, 0, -1], [0, 2, 0]]), ACT: tensor(-0.99, 0.9, 0.1, 0.5)}


@pytest.mark.parametrize(
    ("changes", "statistic", "expected"),
    [
        # A layer's parameters count as one vector.
        ({"weights": VECTOR}, "weight_norm", [5, None]),
        ({"weights": {WEIGHT: tensor(3, 3, 3, 3), BIAS: tensor(3, 3)}}, "weight_rms", [3, None]),
        (
            {"weights": VECTOR, "update_ratios": {WEIGHT: 0.1, BIAS: 0.5}},
            "update_ratio", [math.hypot(0.1 * 3, 0.5 * 4) / 5, None],
        ),
        (
            {"second_moments": {WEIGHT: tensor(4, 4, 4, 4), BIAS: tensor(1, 9)}},
            "second_moment_rms", [math.sqrt(26 / 6), None],
        ),
        # Parameters that were all zero do not count.
        (
            {"weights": {**VECTOR, BIAS: tensor(0, 0)}, "update_ratios": {WEIGHT: 0.1, BIAS: INF}},
            "update_ratio", [0.1, None],
        ),
        (
            {"weights": {WEIGHT: tensor(0, 0)}, "update_ratios": {WEIGHT: NAN}},
            "update_ratio", [None, None],
        ),
        ({"weights": {WEIGHT: tensor(0, 0)}}, "weight_norm", [0, None]),
        # An element or a ratio that is no number.
        (
            {"weights": {**LONG, BIAS: tensor(NAN)}, "update_ratios": {WEIGHT: 0.1, BIAS: 0.1}},
            "update_ratio", [NAN, None],
        ),
        ({"weights": LONG, "update_ratios": {WEIGHT: 0.1}}, "update_ratio", [0.1, None]),
        (
            {"weights": LONG, "update_ratios": {WEIGHT: 0.1, BIAS: INF}},
            "update_ratio", [INF, None],
        ),
        (NOT_FINITE, "activation_rms", [NAN, INF]),
        (NOT_FINITE, "weight_norm", [INF, None]),
        (NOT_FINITE, "update_ratio", [NAN, None]),
        (
            {
                "outputs": {FIRST: tensor(1, NAN)}, "output_grads": {FIRST: tensor(INF, NAN)},
                "weights": {WEIGHT: tensor(NAN), BIAS: tensor(1)}, "grads": {BIAS: tensor(-INF)},
            },
            "nonfinite", [5, None],
        ),
        # All outputs count together, a single one as it is.
        ({"outputs": {ACT: tensor(3, 0), ACT1: tensor(4, 0)}}, "activation_rms", [None, 2.5]),
        ({"outputs": {ACT: tensor(3, 0), ACT1: tensor(4, 0)}}, "zero_fraction", [None, 0.5]),
        ({"outputs": UNITS}, "activation_min", [0, -0.99]),
        ({"outputs": UNITS}, "activation_max", [2, 0.3]),
        ({"outputs": UNITS}, "saturation", [None, 0.25]),
        ({"outputs": UNITS}, "dead_units", [0.5, 1 / 3]),
        # Dead units need extremes of units, and saturation a bounded activation.
        ({"outputs": BOUNDED}, "dead_units", [1 / 3, None]),
        ({"outputs": BOUNDED}, "saturation", [None, 0.5]),
        # Two ranks differ.
        (
            {"ranks": RankFacts(size=2, held=frozenset([0, 1]), activation_rms=SPREADS)},
            "rank_spread", [0.75, None],
        ),
        # Norms of parameters are joined without overflow.
        ({"grad_norms": np.array([0.0, 0.0])}, "grad_norm", [0, None]),
        ({"grad_norms": np.array([3e200, 4e200])}, "grad_norm", [5e200, None]),
        ({"grad_norms": np.array([0.0, 3e200])}, "grad_norm", [3e200, None]),
        ({"grad_norms": np.array([INF, 1e200])}, "grad_norm", [INF, None]),
        ({"grad_norms": np.array([NAN, 1.0])}, "grad_norm", [NAN, None]),
        # Absent or skipped gradients are unknown.
        (ABSENT, "grad_norm", [3, None]),
        (ABSENT, "grad_rms", [1.5, None]),
        (ABSENT, "grad_share", [1, None]),
        ({"grad_norms": np.array([INF, NAN]), "skipped": True}, "grad_norm", [None, None]),
        ({"outputs": {FIRST: tensor(0, 0), ACT: tensor(NAN)}}, "fp8_underflow", [None, None]),
    ],
)  # fmt: skip
def test_a_statistic_of_both_layers(
    changes: dict[str, Any], statistic: str, expected: list[float | None]
) -> None:
    found = column(record(**changes), statistic)
    assert [value is None for value in found] == [value is None for value in expected]
    for value, right in zip(found, expected, strict=True):
        assert value == pytest.approx(right, nan_ok=True)


def test_parameters_without_a_value_are_omitted_from_statistics() -> None:
    measured = record(
        grad_present=np.array([False, True]),
        weights={"first.weight": tensor(3, 4), "first.bias": tensor()},
    )
    assert PARAMETER_STATISTICS["grad_norm"](measured) == {"first.bias": 4.0}
    assert PARAMETER_STATISTICS["weight_norm"](measured) == {"first.weight": 5.0}


def test_moments_of_the_outputs_are_those_of_numpy() -> None:
    values = np.random.default_rng(0).normal(2, 3, 1000)
    measured = record(outputs={Output("first"): tensor(*values)})
    deviations = values - values.mean()
    kurtosis = np.mean(deviations**4) / np.mean(deviations**2) ** 2
    assert column(measured, "activation_std")[0] == pytest.approx(values.std())
    assert column(measured, "activation_kurtosis")[0] == pytest.approx(kurtosis)


def rounded_to_zero(values: NDArray[np.float64]) -> float:
    """Return the share of nonzero values that a cast to scaled e4m3 makes zero."""
    scaled = torch.from_numpy(values) * (448 / np.abs(values).max())
    lost = (scaled.to(torch.float8_e4m3fn).double() == 0).numpy() & (values != 0)
    return float(lost.sum() / np.count_nonzero(values))


@pytest.mark.parametrize("decades", [0.5, 2.0, 4.0])
def test_fp8_underflow_is_the_share_that_a_cast_makes_zero(decades: float) -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=20_000) * 10 ** random.normal(0, decades, 20_000)
    values[::7] = 0
    grads, weights = 3 * values[:5000], [values[5000:9000], values[9000:10_000]]
    measured = record(
        outputs={Output("first"): tensor(*values)},
        output_grads={Output("first"): tensor(*grads)},
        weights={
            "first.weight": tensor(*weights[0]),
            "first.bias": tensor(*weights[1]),
        },
    )
    # The threshold is inside of a bucket, which holds at most 2 % of these values.
    expected = rounded_to_zero(values)
    assert column(measured, "fp8_underflow")[0] == pytest.approx(expected, abs=2e-3)
    expected = rounded_to_zero(grads)
    assert column(measured, "grad_fp8_underflow")[0] == pytest.approx(expected, abs=4e-3)
    # Each parameter has its own factor.
    sizes = [np.count_nonzero(weight) for weight in weights]
    lost = sum(size * rounded_to_zero(w) for size, w in zip(sizes, weights, strict=True))
    assert column(measured, "weight_fp8_underflow")[0] == pytest.approx(lost / sum(sizes), abs=5e-3)


@pytest.mark.parametrize(
    ("values", "share"),
    [((448.0, 0.8 * 2.0**-10), 0.5), ((448.0, 1.2 * 2.0**-10), 0.0), ((0.0, 3.0), 0.0)],
)
def test_fp8_underflow_begins_at_half_of_the_smallest_number(
    values: tuple[float, ...], share: float
) -> None:
    measured = record(outputs={Output("first"): tensor(*values)})
    assert column(measured, "fp8_underflow")[0] == share


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_outlier_ratio_is_the_largest_unit_over_the_median_unit(count: int) -> None:
    random = np.random.default_rng(count)
    values = random.normal(size=(64, count)) * 10 ** random.normal(0, 1, count)
    units = (values.min(axis=0), values.max(axis=0))
    measured = record(outputs={Output("first"): tensor(*values.ravel(), units=units)})
    sizes = np.abs(values.astype(np.float32)).max(axis=0).astype(np.float64)
    expected = sizes.max() / np.median(sizes)
    assert column(measured, "outlier_ratio")[0] == pytest.approx(expected)


@pytest.mark.parametrize(
    "units",
    [([0, 0, 0], [0, 0, 5]), ([np.nan, 0, 0], [np.nan, 1, 1]), ([np.inf], [-np.inf])],
)
def test_outlier_ratio_is_unknown_where_the_median_unit_has_no_size(units: Any) -> None:
    measured = record(outputs={Output("first"): tensor(0, 5, units=units)})
    assert column(measured, "outlier_ratio")[0] is None


def test_a_model_without_layers_has_an_empty_table() -> None:
    assert table(StepRecord(step=0)).values.shape == (0, len(STATISTICS))

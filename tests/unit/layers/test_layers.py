"""One number per layer and statistic, checked against NumPy on the tensors themselves."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from telemetry import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.layers import MATRIX_STATISTICS, PARAMETER_STATISTICS, STATISTICS, table
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
    values = {
        "step": 3,
        "wall_time": 0.0,
        "layout": LAYOUT,
        "grad_norms": np.array([3.0, 4.0]),
        "grad_present": np.array([True, True]),
        "grad_finite": np.array([True, True]),
        "full": True,
    }
    return StepRecord(**{**values, **changes})


def column(measured: StepRecord, name: str) -> list[float | None]:
    """Return a statistic of both layers; None where it was not measured."""
    return [table(measured).value(row, name) for row in range(2)]


def test_an_unknown_column_is_an_error_with_the_closest_ones() -> None:
    with pytest.raises(KeyError, match="no statistic 'grad_nrm'; the closest are grad_norm"):
        table(record()).column("grad_nrm")


def test_a_layers_parameters_count_as_one_vector() -> None:
    measured = record(
        weights={"first.weight": tensor(1, 2, 2, 0), "first.bias": tensor(4, 0)},
        update_ratios={"first.weight": 0.1, "first.bias": 0.5},
    )
    assert column(measured, "weight_norm") == [5.0, None]
    expected = math.hypot(0.1 * 3, 0.5 * 4) / 5
    assert column(measured, "update_ratio") == [pytest.approx(expected), None]


def test_parameters_that_were_all_zero_do_not_count_in_the_update_ratio() -> None:
    measured = record(
        weights={"first.weight": tensor(1, 2, 2, 0), "first.bias": tensor(0, 0)},
        update_ratios={"first.weight": 0.1, "first.bias": math.inf},
    )
    assert column(measured, "update_ratio")[0] == pytest.approx(0.1)


def test_a_layer_whose_parameters_were_all_zero_has_no_update_ratio() -> None:
    measured = record(
        weights={"first.weight": tensor(0, 0)}, update_ratios={"first.weight": math.nan}
    )
    assert column(measured, "update_ratio")[0] is None
    assert column(measured, "weight_norm")[0] == 0.0


def test_activations_of_all_outputs_count_together() -> None:
    measured = record(outputs={Output("act"): tensor(3, 0), Output("act", 1): tensor(4, 0)})
    assert column(measured, "activation_rms") == [None, pytest.approx(2.5)]
    assert column(measured, "zero_fraction") == [None, 0.5]


def test_outputs_of_a_module_are_merged_and_single_outputs_are_unchanged() -> None:
    measured = record(
        outputs={
            Output("act"): tensor(-0.99, 0.1, units=[[0, 0, 1], [0, 0, 1]]),
            Output("first"): tensor(2, 0, units=[[0, 1], [0, 1]]),
            Output("act", 1): tensor(0.2, 0.3, units=[[0, -1, 1], [0, 1, 1]]),
        }
    )
    assert column(measured, "activation_min") == [0.0, -0.99]
    assert column(measured, "activation_max") == [2.0, 0.3]
    assert column(measured, "saturation") == [None, 0.25]
    assert column(measured, "dead_units") == [0.5, pytest.approx(1 / 3)]


def test_an_update_ratio_is_not_a_number_if_an_element_or_a_ratio_is_not() -> None:
    weights = {"first.weight": tensor(3, 4), "first.bias": tensor(math.nan)}
    broken = record(weights=weights, update_ratios={"first.weight": 0.1, "first.bias": 0.1})
    assert math.isnan(column(broken, "update_ratio")[0])
    weights = {"first.weight": tensor(3, 4), "first.bias": tensor(12)}
    partly = record(weights=weights, update_ratios={"first.weight": 0.1})
    assert column(partly, "update_ratio")[0] == pytest.approx(0.1)
    moved_off = record(weights=weights, update_ratios={"first.weight": 0.1, "first.bias": math.inf})
    assert column(moved_off, "update_ratio")[0] == math.inf


def test_the_spread_over_ranks_exists_where_two_ranks_differ() -> None:
    spreads = {
        Output("first"): Spread(low=1.0, low_rank=0, high=4.0, high_rank=1),
        Output("act"): Spread(low=1.0, low_rank=0, high=1.0, high_rank=0),
        Output("act", 1): Spread(low=1.0, low_rank=0, high=2.0, high_rank=1),
    }
    ranks = RankFacts(size=2, held=frozenset([0, 1]), activation_rms=spreads)
    assert column(record(ranks=ranks), "rank_spread") == [0.75, None]


def test_parameters_without_a_value_are_omitted_from_statistics() -> None:
    measured = record(
        grad_present=np.array([False, True]),
        weights={"first.weight": tensor(3, 4), "first.bias": tensor()},
    )
    assert PARAMETER_STATISTICS["grad_norm"](measured) == {"first.bias": 4.0}
    assert PARAMETER_STATISTICS["weight_norm"](measured) == {"first.weight": 5.0}


def test_nan_and_infinity_make_norms_and_means_not_finite() -> None:
    measured = record(
        outputs={Output("first"): tensor(1, math.nan), Output("act"): tensor(1, -math.inf)},
        weights={"first.weight": tensor(1, math.inf)},
        update_ratios={"first.weight": math.nan},
    )
    assert math.isnan(column(measured, "activation_rms")[0])
    assert column(measured, "activation_rms")[1] == math.inf
    assert column(measured, "weight_norm")[0] == math.inf
    assert math.isnan(column(measured, "update_ratio")[0])


def test_nonfinite_elements_of_outputs_gradients_and_weights_are_counted() -> None:
    measured = record(
        outputs={Output("first"): tensor(1, math.nan)},
        output_grads={Output("first"): tensor(math.inf, math.nan)},
        weights={"first.weight": tensor(math.nan), "first.bias": tensor(1)},
        grads={"first.bias": tensor(-math.inf)},
    )
    assert column(measured, "nonfinite") == [5.0, None]


def test_dead_units_need_extremes_of_units_and_saturation_needs_a_bounded_activation() -> None:
    measured = record(
        outputs={
            Output("first"): tensor(1, 1, units=[[0, 0, -1], [0, 2, 0]]),
            Output("act"): tensor(-0.99, 0.9, 0.1, 0.5),
        }
    )
    assert column(measured, "dead_units") == [pytest.approx(1 / 3), None]
    assert column(measured, "saturation") == [None, 0.5]


def test_absent_or_skipped_gradients_are_unknown() -> None:
    absent = record(grad_norms=np.array([3.0, 0.0]), grad_present=np.array([True, False]))
    assert column(absent, "grad_norm") == [3.0, None]
    assert column(absent, "grad_rms") == [1.5, None]
    assert column(absent, "grad_share") == [1.0, None]
    skipped = record(grad_norms=np.array([math.inf, math.nan]), skipped=True)
    assert column(skipped, "grad_norm") == [None, None]


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


def test_fp8_underflow_is_unknown_without_values_other_than_zero() -> None:
    measured = record(outputs={Output("first"): tensor(0, 0), Output("act"): tensor(math.nan)})
    assert column(measured, "fp8_underflow") == [None, None]


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


def test_second_moment_rms_is_the_root_of_adams_mean_square() -> None:
    moments = {"first.weight": tensor(4, 4, 4, 4), "first.bias": tensor(1, 9)}
    measured = record(second_moments=moments)
    assert column(measured, "second_moment_rms") == [pytest.approx(math.sqrt(26 / 6)), None]


def test_a_weights_rms_does_not_depend_on_the_layers_size() -> None:
    measured = record(weights={"first.weight": tensor(3, 3, 3, 3), "first.bias": tensor(3, 3)})
    assert column(measured, "weight_rms") == [pytest.approx(3.0), None]


def test_a_model_without_layers_has_an_empty_table() -> None:
    empty = record(
        layout=Layout(modules=(), parameters=()), grad_norms=np.empty(0),
        grad_present=np.empty(0, bool), grad_finite=np.empty(0, bool),
    )  # fmt: skip
    assert table(empty).values.shape == (0, len(STATISTICS))


def test_a_step_takes_at_most_96_bytes_per_layer() -> None:
    assert 4 * len(MATRIX_STATISTICS) + 2 * 4 <= 96  # with the norms of a weight and a bias

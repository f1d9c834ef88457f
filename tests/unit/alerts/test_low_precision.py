"""Values and units that leave the range that 8-bit floats hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from telemetry import Alert
from telemetry.alerts.outputs import LowPrecision
from telemetry.records import Layout, Module, Output, Parameter, StepRecord, TensorRecord
from telemetry.records.sketch import sketch_array

LAYOUT = Layout(
    modules=(Module(name="layer", type_name="Linear"), Module(name="act", type_name="Sigmoid")),
    parameters=(Parameter(name="layer.weight", module_name="layer", shape=(16, 4)),),
)
Make = Callable[[int], np.ndarray[Any, Any]]


def usual(step: int) -> np.ndarray[Any, Any]:
    """Return 32 samples of 16 units."""
    return np.random.default_rng(step).normal(size=(32, 16))


def with_a_large_unit(step: int) -> np.ndarray[Any, Any]:
    values = usual(step)
    values[:, 3] *= 1000
    return values


def with_a_huge_value(step: int) -> np.ndarray[Any, Any]:
    values = usual(step)
    values[0, 3] = 1e9
    return values


def records(outputs: Make, weights: Make = usual, *, module: str = "layer") -> Iterator[StepRecord]:
    """Yield full steps whose values change at step 30."""
    for step in range(40):
        values = (outputs if step >= 30 else usual)(step)
        weight = (weights if step >= 30 else usual)(step)
        units = values.min(axis=0).astype(np.float32), values.max(axis=0).astype(np.float32)
        output = TensorRecord(sketch=sketch_array(values), unit_min=units[0], unit_max=units[1])
        yield StepRecord(
            step=step, wall_time=0.0, layout=LAYOUT, full=True,
            grad_norms=np.ones(1), grad_present=np.ones(1, bool), grad_finite=np.ones(1, bool),
            outputs={Output(module): output},
            weights={"layer.weight": TensorRecord(sketch=sketch_array(weight))},
        )  # fmt: skip


def found(detector: LowPrecision, steps: Iterator[StepRecord]) -> list[Alert]:
    return [alert for record in steps for alert in detector(record)]


def test_a_large_unit_is_reported_at_the_second_step_with_it() -> None:
    [alert] = found(LowPrecision(), records(with_a_large_unit))
    assert (alert.step, alert.module_name, alert.severity) == (31, "layer", "note")
    sizes = np.abs(with_a_large_unit(31)).max(axis=0)
    assert alert.value == pytest.approx(sizes.max() / np.median(sizes), rel=1e-6)


@pytest.mark.parametrize(
    ("outputs", "weights"), [(with_a_huge_value, usual), (usual, with_a_huge_value)]
)
def test_values_that_8_bit_floats_lose_are_reported(outputs: Make, weights: Make) -> None:
    [alert] = found(LowPrecision(), records(outputs, weights))
    assert (alert.step, alert.module_name) == (31, "layer")
    assert alert.value == pytest.approx(511 / 512, abs=1e-3)
    assert alert.threshold == LowPrecision.share


def test_it_resolves_when_the_values_are_usual_again() -> None:
    steps = [*records(with_a_large_unit)]
    later = [replace(record, step=record.step + 40) for record in records(usual)]
    alerts = found(LowPrecision(), iter([*steps, *later]))
    assert [alert.stage for alert in alerts] == ["started", "resolved"]


@pytest.mark.parametrize(
    "steps",
    [
        records(usual),
        records(with_a_huge_value, module="act"),  # a layer without parameters
        iter([*records(with_a_large_unit)][30:]),  # so from the beginning
    ],
    ids=["usual", "without parameters", "from the beginning"],
)
def test_no_other_layer_is_reported(steps: Iterator[StepRecord]) -> None:
    assert found(LowPrecision(), steps) == []


def test_a_layer_that_runs_late_has_no_baseline() -> None:
    late = [record for record in records(with_a_large_unit) if record.step >= 30]
    early = [
        replace(record, outputs={}, weights={}) for record in records(usual) if record.step < 30
    ]
    assert found(LowPrecision(), iter([*early, *late])) == []


def test_limits_are_arguments() -> None:
    assert found(LowPrecision(outlier_ratio=1e6, share=0.5), records(with_a_large_unit)) == []

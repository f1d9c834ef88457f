"""One step's record as one number per layer and statistic.

A layer is a module; its parameters count together, as one long vector, and so do all tensors that
it returned. What is not finite is part of a norm or mean, which then is not finite either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from telemetry.plugin_data.format import MISSING, Statistic
from telemetry.plugin_data.saturation import saturation
from telemetry.records import Layout, Output, StepRecord, TensorRecord
from telemetry.sketch import Sketch

GRADIENT_STATISTICS = (
    Statistic(
        name="grad_norm",
        title="Gradient norm",
        description="L2 norm of the gradients of the layer's parameters, as the optimizer used it.",
        every_step=True,
    ),
    Statistic(
        name="grad_rms",
        title="Gradient RMS",
        description="The gradient norm over the root of the number of elements: comparable "
        "between layers of different size.",
        every_step=True,
    ),
)
"""Made from the norms of every step; the others are columns of a full step's matrix."""

MATRIX_STATISTICS = (
    Statistic(
        name="update_ratio",
        title="Update ratio",
        description="How far the step moved the parameters, relative to their norm. Around 1e-3 "
        "is usual.",
    ),
    Statistic(
        name="activation_rms",
        title="Activation RMS",
        description="Root mean square of everything the layer returned.",
    ),
    Statistic(
        name="activation_grad_rms",
        title="Activation gradient RMS",
        description="Root mean square of the gradients with respect to what the layer returned.",
    ),
    Statistic(
        name="zero_fraction",
        title="Zero fraction",
        unit="share",
        log=False,
        description="Share of exact zeros in what the layer returned.",
    ),
    Statistic(
        name="dead_units",
        title="Dead units",
        unit="share",
        log=False,
        description="Share of units or channels that returned zero for the whole batch.",
    ),
    Statistic(
        name="saturation",
        title="Saturation",
        unit="share",
        log=False,
        description="Share of outputs where the activation function's slope is at most about a "
        "quarter of its largest (Sigmoid, Tanh, Softsign, Hardsigmoid, ReLU6).",
    ),
    Statistic(
        name="weight_norm",
        title="Weight norm",
        description="L2 norm of the layer's parameters before the step.",
    ),
    Statistic(
        name="nonfinite",
        title="Non-finite count",
        unit="elements",
        description="NaN and infinite elements in outputs, parameters and both their gradients.",
    ),
)
STATISTICS = GRADIENT_STATISTICS + MATRIX_STATISTICS

_FLOAT32_MAX = float(np.finfo(np.float32).max)


def matrix(record: StepRecord) -> NDArray[np.float32]:
    """All of :data:`MATRIX_STATISTICS`, shape ``[modules, statistics]``."""
    layout = record.layout
    outputs = _by_module(layout, record.outputs)
    gradients = _by_module(layout, record.output_grads)
    columns = {
        **_parameter_columns(record),
        "activation_rms": _column(layout, {row: _rms(r.sketch) for row, r in outputs.items()}),
        "activation_grad_rms": _column(
            layout, {row: _rms(r.sketch) for row, r in gradients.items()}
        ),
        "zero_fraction": _column(
            layout, {row: r.sketch.zero_fraction for row, r in outputs.items()}
        ),
        "dead_units": _column(layout, {row: r.dead_fraction for row, r in outputs.items()}),
        "saturation": _column(layout, _saturations(layout, outputs)),
        "nonfinite": _nonfinite(record, outputs, gradients),
    }
    # A fraction of nothing is NaN, and none of the three says anything about NaN in the outputs.
    for name in ("zero_fraction", "dead_units", "saturation"):
        columns[name] = np.nan_to_num(columns[name], nan=MISSING)
    stacked = np.stack([columns[statistic.name] for statistic in MATRIX_STATISTICS], axis=1)
    return as_float32(stacked)


def grad_norms(record: StepRecord) -> NDArray[np.float32]:
    """Norm of each parameter's gradient, shape ``[parameters]``; missing where there was none.

    Those of a step that a ``GradScaler`` skipped are missing, too: they never met a parameter.
    """
    if record.skipped:
        return np.full(len(record.grad_norms), MISSING, np.float32)
    norms = record.grad_norms
    # A norm beyond float32 is not an infinite gradient.
    norms = np.where(record.grad_finite, np.minimum(norms, _FLOAT32_MAX), norms)
    return as_float32(np.where(record.grad_present, norms, MISSING))


def as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rounded; finite numbers beyond float32 become the largest there is."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    return np.where(np.isinf(narrow) & np.isfinite(values), np.float32(_FLOAT32_MAX), narrow)


def _by_module(layout: Layout, outputs: Mapping[Output, TensorRecord]) -> dict[int, TensorRecord]:
    """The tensors of each module as one, by its position."""
    parts: dict[int, list[TensorRecord]] = {}
    for output, record in outputs.items():
        parts.setdefault(layout.position[output.module_name], []).append(record)
    return {row: TensorRecord.merge_all(records) for row, records in parts.items()}


def _saturations(layout: Layout, outputs: Mapping[int, TensorRecord]) -> dict[int, float]:
    shares = {
        row: saturation(layout.modules[row].type_name, record.sketch)
        for row, record in outputs.items()
    }
    return {row: share for row, share in shares.items() if share is not None}


def _parameter_columns(record: StepRecord) -> dict[str, NDArray[np.float64]]:
    """Norm of each module's parameters, and how far they moved relative to it."""
    layout = record.layout
    names = [parameter.name for parameter in layout.parameters]
    weights, ratios = record.weights, record.update_ratios
    norms = np.array([_norm(weights[n].sketch) if n in weights else MISSING for n in names])
    moved = np.array([ratios.get(n, MISSING) for n in names])
    known = norms != MISSING
    # Relative to zero there is no ratio: what was all zeros is left out.
    compared = known & (moved != MISSING) & (norms != 0)
    with np.errstate(invalid="ignore", over="ignore"):
        squares = np.square(norms)
        total = sum_by_module(layout, squares, known)
        before = sum_by_module(layout, squares, compared)
        distance = sum_by_module(layout, squares * np.square(moved), compared)
        ratio = np.sqrt(distance / before)
    return {
        "weight_norm": np.where(total == MISSING, MISSING, np.sqrt(np.maximum(total, 0))),
        "update_ratio": np.where(before == MISSING, MISSING, ratio),
    }


def sum_by_module(
    layout: Layout, values: NDArray[np.float64], chosen: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Sum over the chosen parameters of each module; missing where none is chosen.

    Args:
        layout: Says which module owns which parameter.
        values: Of each parameter, shape ``[parameters]``.
        chosen: Which of them to add up, shape ``[parameters]``.
    """
    owners, size = owners_of(layout)[chosen], len(layout.modules)
    sums = np.bincount(owners, weights=values[chosen], minlength=size)
    return np.where(np.bincount(owners, minlength=size) > 0, sums, MISSING)


def owners_of(layout: Layout) -> NDArray[np.intp]:
    """Position of each parameter's module, shape ``[parameters]``."""
    return np.array([layout.position[p.module_name] for p in layout.parameters], dtype=np.intp)


def _nonfinite(
    record: StepRecord,
    outputs: Mapping[int, TensorRecord],
    gradients: Mapping[int, TensorRecord],
) -> NDArray[np.float64]:
    layout = record.layout
    counts = np.full(len(layout.modules), MISSING)

    def add(row: int, sketch: Sketch) -> None:
        counts[row] = max(counts[row], 0) + sketch.nonfinite_count

    for by_module in (outputs, gradients):
        for row, tensor in by_module.items():
            add(row, tensor.sketch)
    for row, parameter in zip(owners_of(layout), layout.parameters, strict=True):
        for named in (record.weights, record.grads):
            if parameter.name in named:
                add(int(row), named[parameter.name].sketch)
    return counts


def _column(layout: Layout, values: Mapping[int, float]) -> NDArray[np.float64]:
    column = np.full(len(layout.modules), MISSING)
    column[list(values)] = list(values.values())
    return column


def _norm(sketch: Sketch) -> float:
    return _nonfinite_value(sketch, sketch.norm)


def _rms(sketch: Sketch) -> float:
    return _nonfinite_value(sketch, sketch.rms if sketch.count else MISSING)


def _nonfinite_value(sketch: Sketch, finite: float) -> float:
    """A norm or mean over all values, of which the sketch's covers the finite ones."""
    if sketch.nan_count:
        return math.nan
    return math.inf if sketch.nonfinite_count else finite

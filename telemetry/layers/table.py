"""Table of statistics: one number per layer and step each, with the formula for a record.

A layer is a module. Its parameters count as one long vector, and so do all tensors that it
returned. TensorBoard's curves, the run log and alerts use :func:`table`. To add a statistic, add an
entry to :data:`STATISTICS`, with a formula of :mod:`~telemetry.layers.formulas`. Single parameters
have another table, :data:`PARAMETER_STATISTICS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import formulas
from telemetry.layers.record import Column, Group, Layers, figure
from telemetry.plain_text import closest
from telemetry.records import StepRecord, moments, once
from telemetry.records.tensor import Tensors

# Marks a value that was not measured, among values that are never negative.
MISSING = -1.0


@dataclass(frozen=True, kw_only=True)
class Statistic:
    """One number per layer and step."""

    name: str  # in tags, links and commands
    title: str  # label on the page
    unit: str = ""  # of counts; empty for ratios
    log: bool = True  # whether magnitudes matter rather than differences
    description: str  # one sentence
    usual: float | None = None  # usual value in all models, if there is one
    too_little: str = ""  # possible causes of values far below the usual
    too_much: str = ""  # possible causes of values far above it
    of: Callable[[Layers], Column]  # formula for all layers at once
    every_step: bool = False  # whether it is also known at other than full steps
    on_page: bool = True  # whether page and commands show it; then it must not be negative
    as_curve: bool = True  # whether each layer has a curve of it in TensorBoard
    over_depth: bool = False  # whether quantiles over all layers are curves, under ``depth/``
    zero_is_silent: bool = False  # whether the curves omit zeros
    # Whether a layout's first record has it; else the run does not write or show it. None: always.
    measured_in: Callable[[StepRecord], bool] | None = None


_share = partial(Statistic, unit="share", log=False)
_underflow = partial(
    _share,
    too_much="8-bit floats lose small values: scale blocks of the tensor, or keep the layer in "
    "bfloat16",
)

_WEAK = "a vanishing gradient, dead units behind it, or a detached layer"
_STRONG = "an explosion: a learning rate too large, a bad batch, no clipping"

STATISTICS = (
    Statistic(
        name="grad_norm",
        title="Gradient norm",
        description="L2 norm of the gradients of the layer's parameters, as the optimizer used it.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=formulas.grad_norm,
        every_step=True,
        over_depth=True,
        as_curve=False,
    ),
    Statistic(
        name="grad_rms",
        title="Gradient RMS",
        description="The gradient norm over the root of the number of elements: comparable "
        "between layers of different size.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=formulas.grad_rms,
        every_step=True,
        as_curve=False,
    ),
    _share(
        name="grad_share",
        title="Gradient share",
        description="Part of the squared gradient norm of all watched parameters that is the "
        "layer's; all layers together have 1.",
        too_much="one layer dominates the step, and clipping by the norm scales down all others",
        of=formulas.grad_share,
        every_step=True,
        as_curve=False,
    ),
    Statistic(
        name="update_ratio",
        title="Update ratio",
        description="How far the step moved the parameters, relative to their norm. Around 1e-3 "
        "is usual.",
        usual=1e-3,
        too_little="the layer hardly learns: a small learning rate, or no gradient",
        too_much="its weights jump: a learning rate too large for it, or weights near zero",
        of=formulas.update_ratio,
        over_depth=True,
        as_curve=False,
    ),
    Statistic(
        name="activation_rms",
        title="Activation RMS",
        description="Root mean square of everything the layer returned.",
        too_little="small initial weights, or a signal that fades from layer to layer",
        too_much="large weights, no normalization, or branches that add up",
        of=formulas.of_output(moments.rms_of),
        over_depth=True,
    ),
    Statistic(
        name="activation_mean",
        title="Activation mean",
        log=False,
        description="Mean of everything the layer returned.",
        of=formulas.of_output(moments.mean_of),
        on_page=False,
    ),
    Statistic(
        name="activation_std",
        title="Activation standard deviation",
        description="Standard deviation of everything the layer returned.",
        of=formulas.of_output(moments.std_of),
    ),
    Statistic(
        name="activation_kurtosis",
        title="Activation kurtosis",
        description="Fourth standardized moment of everything the layer returned: 3 for a normal "
        "distribution, far more where a few outliers carry the signal.",
        too_much="a few outliers carry the signal, which low precision does not hold",
        of=formulas.of_output(moments.kurtosis_of),
    ),
    Statistic(
        name="activation_min",
        title="Smallest activation",
        log=False,
        description="Smallest finite value that the layer returned.",
        of=formulas.of_known(attrgetter("min")),
        on_page=False,
    ),
    Statistic(
        name="activation_max",
        title="Largest activation",
        log=False,
        description="Largest finite value that the layer returned.",
        of=formulas.of_known(attrgetter("max")),
        on_page=False,
    ),
    Statistic(
        name="outlier_ratio",
        title="Outlier ratio",
        description="Largest magnitude of any unit of the layer's output over that of its median "
        "unit.",
        too_much="single units carry the signal: low precision loses the others",
        of=formulas.of_known(formulas.outlier_ratio),
    ),
    Statistic(
        name="activation_grad_rms",
        title="Activation gradient RMS",
        description="Root mean square of the gradients with respect to what the layer returned.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=formulas.of_kind("output_grads", moments.rms_of),
        as_curve=False,
    ),
    _share(
        name="zero_fraction",
        title="Zero fraction",
        description="Share of exact zeros in what the layer returned.",
        too_much="ReLU units that seldom fire, or a mask",
        of=formulas.of_known(moments.zero_fraction_of),
    ),
    _share(
        name="dead_units",
        title="Dead units",
        description="Share of units or channels that returned zero for the whole batch.",
        too_much="units that will not recover: a learning rate too large, or a large negative bias",
        of=formulas.of_known(attrgetter("dead_fraction")),
        over_depth=True,
    ),
    _share(
        name="saturation",
        title="Saturation",
        description="Share of outputs where the activation function's slope is at most about a "
        "quarter of its largest (Sigmoid, Tanh, Hardtanh, Softsign, Hardsigmoid, ReLU6).",
        too_much="hardly any gradient comes through: large weights, or inputs that are not scaled",
        of=formulas.saturation,
    ),
    Statistic(
        name="attention_logit_max",
        title="Largest attention logit",
        description="Largest logit in the attention of all heads, at least 0, where the layer "
        "calls scaled_dot_product_attention.",
        too_much="the softmax is 0 or 1 and passes no gradient: queries and keys that grow, a "
        "missing 1 / sqrt(d)",
        of=formulas.of_heads(lambda heads: float(np.maximum(heads.logit_max, 0.0).max())),
        measured_in=attrgetter("attention"),
    ),
    _share(
        name="attention_entropy",
        title="Attention entropy",
        description="Mean entropy of the attention weights over heads and queries, as a share of "
        "that of uniform weights.",
        too_little="each query attends to a single key: logits that are too large",
        of=formulas.of_heads(formulas.mean_entropy),
        measured_in=attrgetter("attention"),
    ),
    Statistic(
        name="expert_load_cv",
        title="Expert load variation",
        log=False,
        description="Standard deviation of the tokens per expert over their mean: 0 if all experts "
        "of the router get equally many.",
        too_much="the router prefers few experts: no load balancing, or one that is too weak",
        of=formulas.of_loads(lambda shares: float(shares.std() / shares.mean())),
        measured_in=attrgetter("expert_loads"),
    ),
    Statistic(
        name="effective_experts",
        title="Effective experts",
        unit="experts",
        log=False,
        description="Exponential of the entropy of the router's load: the number of experts among "
        "which equal loads would be as even.",
        too_little="the router prefers few experts: no load balancing, or one that is too weak",
        of=formulas.of_loads(formulas.effective),
        measured_in=attrgetter("expert_loads"),
    ),
    _share(
        name="dead_experts",
        title="Dead experts",
        description="Share of the router's experts that got no token in the step.",
        too_much="experts that will not recover without load balancing, or few tokens per step",
        of=formulas.of_loads(lambda shares: float(np.mean(shares == 0))),
        measured_in=attrgetter("expert_loads"),
    ),
    Statistic(
        name="weight_norm",
        title="Weight norm",
        description="L2 norm of the layer's parameters before the step.",
        of=formulas.of_kind("weights", moments.norm_of),
        as_curve=False,
    ),
    Statistic(
        name="weight_rms",
        title="Weight RMS",
        description="Root mean square of the layer's parameters before the step: comparable "
        "between layers of different size.",
        of=formulas.of_kind("weights", moments.rms_of),
    ),
    Statistic(
        name="second_moment_rms",
        title="Second moment RMS",
        description="Root of the mean of Adam's exp_avg_sq: the gradient size that the optimizer "
        "expects. A gradient far above it makes a step that is too large.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=formulas.of_kind(
            "second_moments", lambda x: np.sqrt(np.maximum(moments.mean_of(x), 0.0))
        ),
    ),
    _underflow(
        name="fp8_underflow",
        title="FP8 underflow",
        description="Share of the activations other than zero that 8-bit floats (e4m3) round to "
        "zero, when a factor makes the largest one 448.",
        of=formulas.underflow("outputs"),
    ),
    _underflow(
        name="grad_fp8_underflow",
        title="FP8 underflow of gradients",
        description="The same of the gradients with respect to what the layer returned.",
        of=formulas.underflow("output_grads"),
        as_curve=False,
    ),
    _underflow(
        name="weight_fp8_underflow",
        title="FP8 underflow of weights",
        description="The same of the layer's parameters before the step.",
        of=formulas.underflow("weights"),
        as_curve=False,
    ),
    _share(
        name="rank_spread",
        title="Spread over ranks",
        description="How much smaller the activation RMS is on one of several ranks than on "
        "another: 0 where all are alike.",
        of=formulas.rank_spread,
        measured_in=lambda record: record.ranks is not None,
    ),
    Statistic(
        name="nonfinite",
        title="Non-finite count",
        unit="elements",
        description="NaN and infinite elements in outputs, parameters and both their gradients.",
        of=formulas.nonfinite,
        zero_is_silent=True,
    ),
    Statistic(
        name="training_state",
        title="What trains",
        log=False,
        description="Whether the layer's parameters train: "
        + ", ".join(f"{number} {text}" for number, text in enumerate(formulas.TRAINING_STATES))
        + ". Of several parameters, the one that trains most.",
        of=formulas.training_state,
        as_curve=False,
    ),
)
"""All statistics, in the order in which they are shown."""

# Column of each statistic, by its name.
PLACES = {statistic.name: place for place, statistic in enumerate(STATISTICS)}

# Statistics that the Telemetry page and the commands show.
PAGE_STATISTICS = tuple([statistic for statistic in STATISTICS if statistic.on_page])

# Columns of the matrix that a full step writes for the page. Its other statistics are derived from
# the parameters' gradient norms of every step.
MATRIX_STATISTICS = tuple([s for s in PAGE_STATISTICS if not (s.every_step or s.measured_in)])

# Further columns, of runs that measure them.
OPTIONAL_STATISTICS = tuple([s for s in PAGE_STATISTICS if s.measured_in])


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTable:
    """All statistics of all layers at one step."""

    # float64 ``[modules, statistics]`` in the order of ``record.layout.modules`` and of
    # :data:`STATISTICS`. May be NaN or infinite; NaN if not measured.
    values: NDArray[np.float64]
    known: NDArray[np.bool_]  # whether each value was measured, same shape
    outputs: Group  # of the layers

    def column(self, name: str) -> NDArray[np.float64]:
        """Return one statistic of all layers, ``[modules]``; NaN if it was not measured."""
        column: NDArray[np.float64] = self.values[:, _place(name)]
        return column

    def value(self, row: int, name: str) -> float | None:
        """Return one statistic of one layer; None if it was not measured."""
        place = _place(name)
        return float(self.values[row, place]) if self.known[row, place] else None

    @property
    def ran(self) -> NDArray[np.bool_]:
        """Whether each layer returned a tensor, bool ``[modules]``."""
        ran: NDArray[np.bool_] = self.outputs.rows.calls > 0
        return ran


def _place(name: str) -> int:
    if name not in PLACES:
        raise KeyError(f"no statistic {name!r}; {closest(name, PLACES)}")
    return PLACES[name]


@once
def table(record: StepRecord) -> LayerTable:
    """Return all :data:`STATISTICS` of each layer."""
    layers, shape = Layers.of(record), (len(record.layout.modules), len(STATISTICS))
    values, known = np.empty(shape), np.zeros(shape, bool)
    for place, statistic in enumerate(STATISTICS):
        if statistic.measured_in is None or statistic.measured_in(record):
            values[:, place], known[:, place] = statistic.of(layers)
    values[~known] = math.nan
    return LayerTable(values=values, known=known, outputs=layers.outputs)


def _grad_norms(record: StepRecord) -> Mapping[str, float]:
    norms, present = record.grad_norms.tolist(), record.grad_present.tolist()
    columns = zip(record.layout.parameters, norms, present, strict=True)
    return {parameter.name: norm for parameter, norm, is_present in columns if is_present}


def _weight_norms(record: StepRecord) -> Mapping[str, float]:
    norms, known = figure(Tensors.of(record.weights).rows, moments.norm_of)
    columns = zip(record.weights, norms.tolist(), known.tolist(), strict=True)
    return {name: norm for name, norm, is_known in columns if is_known}


# One number per parameter and step: the name of the curves, and the values by parameter names.
# Norms are those of the gradient as the optimizer used it, and of the parameter before the step.
PARAMETER_STATISTICS: Mapping[str, Callable[[StepRecord], Mapping[str, float]]] = {
    "grad_norm": _grad_norms,
    "update_ratio": lambda record: record.update_ratios,
    "weight_norm": _weight_norms,
}

"""Table of statistics: one number per layer and step each, with the formula for a record.

A layer is a module. Its parameters count as one long vector, and so do all tensors that it
returned. TensorBoard's curves, the Telemetry page, the commands, flight files and alerts read
:func:`table`. To add a statistic, add an entry to :data:`STATISTICS`. Single parameters have
another table, :data:`PARAMETER_STATISTICS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.module_types import saturated_shares
from telemetry.layers.record import Column, Group, Layers, Values, figure
from telemetry.records import AttentionHeads, StepRecord, moments, once
from telemetry.records.buckets import edges
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors

# Marks a value that was not measured, among values that are never negative.
MISSING = -1.0


# e4m3: the largest number is 448. The smallest above zero is 2^-9, and half of it rounds to zero,
# as a tie to even (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
_LARGEST_E4M3 = 448.0
_LARGEST_LOST = 2.0**-10


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
    as_curve: bool = False  # whether each layer has a curve of it in TensorBoard
    over_depth: bool = False  # whether quantiles over all layers are curves, under ``depth/``
    zero_is_silent: bool = False  # whether the curves omit zeros
    # Whether a layout's first record has it; else the run does not write or show it. None: always.
    measured_in: Callable[[StepRecord], bool] | None = None


_share = partial(Statistic, unit="share", log=False)


def _of_output(of_finite: Callable[[Rows], Values]) -> Callable[[Layers], Column]:
    """Return the column of a figure over all outputs of a layer, including NaN and infinity."""
    return lambda layers: figure(layers.outputs.rows, of_finite)


def _of_known(of: Callable[[Rows], Values]) -> Callable[[Layers], Column]:
    """Return the column of a figure over some of the outputs; unknown where it is NaN."""
    return lambda layers: Column(values := of(layers.outputs.rows), ~np.isnan(values))


def _grad_norm(layers: Layers) -> Column:
    record, norms = layers.record, layers.record.module_grad_norms
    present = np.bincount(record.layout.owners, record.grad_present, len(norms))
    return Column(norms, (present > 0) & (not record.skipped))


def _grad_rms(layers: Layers) -> Column:
    record, (norms, known) = layers.record, _grad_norm(layers)
    sizes = record.grad_present * record.layout.sizes
    elements = np.bincount(record.layout.owners, sizes, len(norms))
    return Column(norms / np.sqrt(np.maximum(elements, 1)), known)


def _grad_share(layers: Layers) -> Column:
    norms, known = _grad_norm(layers)
    squares = np.square(norms)
    total = squares.sum()
    return Column(squares / (total or math.nan), known & (total != 0))


def _update_ratio(layers: Layers) -> Column:
    """Return the update ratio, without parameters of zeros, which have none."""
    record, weights = layers.record, layers.weights
    ratios = np.array([record.update_ratios.get(name, math.nan) for name in record.weights])
    squares, _ = figure(weights.rows, lambda rows: rows.sum_squares)
    counts = (squares != 0) & ~(np.isnan(ratios) & np.isfinite(squares))
    moved = weights.total(np.where(counts, ratios**2 * squares, 0.0))
    size = weights.total(np.where(counts, squares, 0.0))
    return Column(np.sqrt(moved / size), weights.total(counts) > 0)


def _by_module(layers: Layers, values: Mapping[str, float]) -> Column:
    """Return the column of a figure that only some modules have, by their names."""
    count, position = layers.outputs.size, layers.record.layout.position
    column = Column(np.full(count, math.nan), np.zeros(count, bool))
    for name, value in values.items():
        column.values[position[name]], column.known[position[name]] = value, True
    return column


def _rank_spread(layers: Layers) -> Column:
    """Return the spread over ranks; unknown if one rank measured it or all ranks are equal."""
    ranks, found = layers.record.ranks, dict[str, float]()
    for output, spread in ranks.activation_rms.items() if ranks else ():
        if not output.place and spread.low_rank != spread.high_rank:
            ratio = 0.0 if math.isinf(spread.high) else spread.low / spread.high
            found[output.module_name] = 1 - ratio
    return _by_module(layers, found)


def _of_heads(of: Callable[[AttentionHeads], float]) -> Callable[[Layers], Column]:
    """Return the column of a figure over the heads of each layer's attention."""
    return lambda layers: _by_module(
        layers, {name: of(heads) for name, heads in layers.record.attention.items()}
    )


def _mean_entropy(heads: AttentionHeads) -> float:
    known = heads.entropy[~np.isnan(heads.entropy)]
    return float(known.mean()) if known.size else math.nan


def _saturation(layers: Layers) -> Column:
    types = [module.type_name for module in layers.record.layout.modules]
    return _of_known(lambda rows: saturated_shares(types, rows))(layers)


def _underflow(
    name: str,
    title: str,
    description: str,
    group_of: Callable[[Layers], Group],
    *,
    as_curve: bool = False,
) -> Statistic:
    """Return the statistic of the share of values other than zero that 8-bit floats lose."""

    def column(layers: Layers) -> Column:
        group = group_of(layers)
        lost, values = group.total(np.array(_lost_in_fp8(group.rows)))
        return Column(lost / values, values > 0)

    return _share(
        name=name,
        title=title,
        description=description,
        too_much="8-bit floats lose small values: scale blocks of the tensor, or keep the layer in "
        "bfloat16",
        of=column,
        as_curve=as_curve,
    )


@np.errstate(all="ignore")
def _lost_in_fp8(rows: Rows) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Count the values that a scaling of each tensor to the largest number of e4m3 rounds to zero.

    They follow from the histogram: its buckets are an eighth of an octave, and values within the
    bucket of the threshold count as evenly spread. Returned with the numbers of finite values other
    than zero, float64 ``[rows]`` each.
    """
    threshold = np.fmax(-rows.min, rows.max) * (_LARGEST_LOST / _LARGEST_E4M3)
    which, magnitudes = np.arange(len(rows)).repeat(rows.bucket_count), np.abs(rows.buckets)
    some = np.flatnonzero(edges().take(magnitudes) < threshold[which])
    which, magnitudes = which[some], magnitudes[some]
    low, high = edges().take([magnitudes, magnitudes + 1]).astype(np.float64)
    shares = np.minimum((threshold[which] - low) / (high - low), 1.0)
    zeros = np.where(magnitudes == 0, rows.zero_count[which], 0)
    counts = shares * np.maximum(rows.counts[some] - zeros, 0)
    lost: NDArray[np.float64] = np.bincount(which, counts, len(rows)).astype(np.float64)
    return lost, (moments.finite_of(rows) - rows.zero_count).astype(np.float64)


@np.errstate(all="ignore")
def _outlier_ratio(rows: Rows) -> Values:
    """Return the largest magnitude of any unit over that of the median unit, float64 ``[rows]``.

    NaN where a row has no units, a unit has NaN or no values, or half of the units are zero.
    """
    sizes = np.maximum(-rows.units[:, 0], rows.units[:, 1])
    ratios, starts = np.full(len(rows), np.nan), np.cumsum(rows.unit_count) - rows.unit_count
    for count in {*rows.unit_count.tolist()} - {0}:
        some = np.flatnonzero(rows.unit_count == count)
        ordered = np.sort(sizes[starts[some, None] + np.arange(count)], axis=1)  # NaN last
        lower, upper = ordered[:, (count - 1) // 2].astype(np.float64), ordered[:, count // 2]
        middle = (lower + upper) / 2
        known = (middle > 0) & (ordered[:, 0] >= 0)
        ratios[some] = np.where(known, ordered[:, -1] / middle, np.nan)
    return ratios


def _nonfinite(layers: Layers) -> Column:
    groups = (layers.outputs, layers.output_grads, layers.weights, layers.grads)
    modules = np.concatenate([group.modules for group in groups])
    counts = np.concatenate([moments.nonfinite_of(group.rows) for group in groups])
    size = layers.outputs.size
    calls = np.concatenate([group.rows.calls for group in groups])
    return Column(np.bincount(modules, counts, size), np.bincount(modules, calls, size) > 0)


def _of_loads(of: Callable[[NDArray[np.float64]], float]) -> Callable[[Layers], Column]:
    """Return the column of a figure over the shares of a router's experts, which add up to 1."""

    def column(layers: Layers) -> Column:
        loads, position = layers.record.expert_loads, layers.record.layout.position
        some = {name: load for name, load in loads.items() if name in position and load.any()}
        return _by_module(layers, {name: of(load / load.sum()) for name, load in some.items()})

    return column


def _effective(shares: NDArray[np.float64]) -> float:
    some = shares[shares > 0]
    return math.exp(-(some @ np.log(some)))


_WEAK = "a vanishing gradient, dead units behind it, or a detached layer"
_STRONG = "an explosion: a learning rate too large, a bad batch, no clipping"

STATISTICS = (
    Statistic(
        name="grad_norm",
        title="Gradient norm",
        description="L2 norm of the gradients of the layer's parameters, as the optimizer used it.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=_grad_norm,
        every_step=True,
        over_depth=True,
    ),
    Statistic(
        name="grad_rms",
        title="Gradient RMS",
        description="The gradient norm over the root of the number of elements: comparable "
        "between layers of different size.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=_grad_rms,
        every_step=True,
    ),
    _share(
        name="grad_share",
        title="Gradient share",
        description="Part of the squared gradient norm of all watched parameters that is the "
        "layer's; all layers together have 1.",
        too_much="one layer dominates the step, and clipping by the norm scales down all others",
        of=_grad_share,
        every_step=True,
    ),
    Statistic(
        name="update_ratio",
        title="Update ratio",
        description="How far the step moved the parameters, relative to their norm. Around 1e-3 "
        "is usual.",
        usual=1e-3,
        too_little="the layer hardly learns: a small learning rate, or no gradient",
        too_much="its weights jump: a learning rate too large for it, or weights near zero",
        of=_update_ratio,
        over_depth=True,
    ),
    Statistic(
        name="activation_rms",
        title="Activation RMS",
        description="Root mean square of everything the layer returned.",
        too_little="small initial weights, or a signal that fades from layer to layer",
        too_much="large weights, no normalization, or branches that add up",
        of=_of_output(moments.rms_of),
        as_curve=True,
        over_depth=True,
    ),
    Statistic(
        name="activation_mean",
        title="Activation mean",
        log=False,
        description="Mean of everything the layer returned.",
        of=_of_output(moments.mean_of),
        on_page=False,
        as_curve=True,
    ),
    Statistic(
        name="activation_std",
        title="Activation standard deviation",
        description="Standard deviation of everything the layer returned.",
        of=_of_output(moments.std_of),
        as_curve=True,
    ),
    Statistic(
        name="activation_kurtosis",
        title="Activation kurtosis",
        description="Fourth standardized moment of everything the layer returned: 3 for a normal "
        "distribution, far more where a few outliers carry the signal.",
        too_much="a few outliers carry the signal, which low precision does not hold",
        of=_of_output(moments.kurtosis_of),
        as_curve=True,
    ),
    Statistic(
        name="activation_min",
        title="Smallest activation",
        log=False,
        description="Smallest finite value that the layer returned.",
        of=_of_known(attrgetter("min")),
        on_page=False,
        as_curve=True,
    ),
    Statistic(
        name="activation_max",
        title="Largest activation",
        log=False,
        description="Largest finite value that the layer returned.",
        of=_of_known(attrgetter("max")),
        on_page=False,
        as_curve=True,
    ),
    Statistic(
        name="outlier_ratio",
        title="Outlier ratio",
        description="Largest magnitude of any unit of the layer's output over that of its median "
        "unit.",
        too_much="single units carry the signal: low precision loses the others",
        of=_of_known(_outlier_ratio),
        as_curve=True,
    ),
    Statistic(
        name="activation_grad_rms",
        title="Activation gradient RMS",
        description="Root mean square of the gradients with respect to what the layer returned.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=lambda layers: figure(layers.output_grads.totals, moments.rms_of),
    ),
    _share(
        name="zero_fraction",
        title="Zero fraction",
        description="Share of exact zeros in what the layer returned.",
        too_much="ReLU units that seldom fire, or a mask",
        of=_of_known(moments.zero_fraction_of),
        as_curve=True,
    ),
    _share(
        name="dead_units",
        title="Dead units",
        description="Share of units or channels that returned zero for the whole batch.",
        too_much="units that will not recover: a learning rate too large, or a large negative bias",
        of=_of_known(attrgetter("dead_fraction")),
        as_curve=True,
        over_depth=True,
    ),
    _share(
        name="saturation",
        title="Saturation",
        description="Share of outputs where the activation function's slope is at most about a "
        "quarter of its largest (Sigmoid, Tanh, Hardtanh, Softsign, Hardsigmoid, ReLU6).",
        too_much="hardly any gradient comes through: large weights, or inputs that are not scaled",
        of=_saturation,
        as_curve=True,
    ),
    Statistic(
        name="attention_logit_max",
        title="Largest attention logit",
        description="Largest logit in the attention of all heads, at least 0, where the layer "
        "calls scaled_dot_product_attention.",
        too_much="the softmax is 0 or 1 and passes no gradient: queries and keys that grow, a "
        "missing 1 / sqrt(d)",
        of=_of_heads(lambda heads: float(np.maximum(heads.logit_max, 0.0).max())),
        as_curve=True,
        measured_in=attrgetter("attention"),
    ),
    _share(
        name="attention_entropy",
        title="Attention entropy",
        description="Mean entropy of the attention weights over heads and queries, as a share of "
        "that of uniform weights.",
        too_little="each query attends to a single key: logits that are too large",
        of=_of_heads(_mean_entropy),
        as_curve=True,
        measured_in=attrgetter("attention"),
    ),
    Statistic(
        name="expert_load_cv",
        title="Expert load variation",
        log=False,
        description="Standard deviation of the tokens per expert over their mean: 0 if all experts "
        "of the router get equally many.",
        too_much="the router prefers few experts: no load balancing, or one that is too weak",
        of=_of_loads(lambda shares: float(shares.std() / shares.mean())),
        as_curve=True,
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
        of=_of_loads(_effective),
        as_curve=True,
        measured_in=attrgetter("expert_loads"),
    ),
    _share(
        name="dead_experts",
        title="Dead experts",
        description="Share of the router's experts that got no token in the step.",
        too_much="experts that will not recover without load balancing, or few tokens per step",
        of=_of_loads(lambda shares: float(np.mean(shares == 0))),
        as_curve=True,
        measured_in=attrgetter("expert_loads"),
    ),
    Statistic(
        name="weight_norm",
        title="Weight norm",
        description="L2 norm of the layer's parameters before the step.",
        of=lambda layers: figure(layers.weights.totals, moments.norm_of),
    ),
    Statistic(
        name="weight_rms",
        title="Weight RMS",
        description="Root mean square of the layer's parameters before the step: comparable "
        "between layers of different size.",
        of=lambda layers: figure(layers.weights.totals, moments.rms_of),
        as_curve=True,
    ),
    Statistic(
        name="second_moment_rms",
        title="Second moment RMS",
        description="Root of the mean of Adam's exp_avg_sq: the gradient size that the optimizer "
        "expects. A gradient far above it makes a step that is too large.",
        too_little=_WEAK,
        too_much=_STRONG,
        of=lambda layers: figure(
            layers.second_moments.totals, lambda x: np.sqrt(np.maximum(moments.mean_of(x), 0.0))
        ),
        as_curve=True,
    ),
    _underflow(
        "fp8_underflow",
        "FP8 underflow",
        "Share of the activations other than zero that 8-bit floats (e4m3) round to zero, when a "
        "factor makes the largest one 448.",
        attrgetter("outputs"),
        as_curve=True,
    ),
    _underflow(
        "grad_fp8_underflow",
        "FP8 underflow of gradients",
        "The same of the gradients with respect to what the layer returned.",
        attrgetter("output_grads"),
    ),
    _underflow(
        "weight_fp8_underflow",
        "FP8 underflow of weights",
        "The same of the layer's parameters before the step.",
        attrgetter("weights"),
    ),
    _share(
        name="rank_spread",
        title="Spread over ranks",
        description="How much smaller the activation RMS is on one of several ranks than on "
        "another: 0 where all are alike.",
        of=_rank_spread,
        as_curve=True,
        measured_in=lambda record: record.ranks is not None,
    ),
    Statistic(
        name="nonfinite",
        title="Non-finite count",
        unit="elements",
        description="NaN and infinite elements in outputs, parameters and both their gradients.",
        of=_nonfinite,
        as_curve=True,
        zero_is_silent=True,
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
        column: NDArray[np.float64] = self.values[:, PLACES[name]]
        return column

    def value(self, row: int, name: str) -> float | None:
        """Return one statistic of one layer; None if it was not measured."""
        place = PLACES[name]
        return float(self.values[row, place]) if self.known[row, place] else None

    @property
    def ran(self) -> NDArray[np.bool_]:
        """Whether each layer returned a tensor, bool ``[modules]``."""
        ran: NDArray[np.bool_] = self.outputs.rows.calls > 0
        return ran


@once
def table(record: StepRecord) -> LayerTable:
    """Return all :data:`STATISTICS` of each layer."""
    layers = Layers.of(record)
    columns = [statistic.of(layers) for statistic in STATISTICS]
    values, known = (np.array(parts).T for parts in zip(*columns, strict=True))
    values = np.where(known, values, math.nan)
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

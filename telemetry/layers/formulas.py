"""Formulas of the statistics of layers: each is a column over all layers of a record.

:mod:`telemetry.layers.table` names and describes the statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.module_types import saturated_shares
from telemetry.layers.record import KINDS, Column, Layers, Values, figure
from telemetry.records import AttentionHeads, moments, once
from telemetry.records.buckets import edges
from telemetry.records.rows import Rows

# e4m3: the largest number is 448. The smallest above zero is 2^-9, and half of it rounds to zero,
# as a tie to even (Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433).
_LARGEST_E4M3 = 448.0
_LARGEST_LOST = 2.0**-10


def of_output(of_finite: Callable[[Rows], Values]) -> Callable[[Layers], Column]:
    """Return the column of a figure over all outputs of a layer, including NaN and infinity."""
    return lambda layers: figure(layers.outputs.rows, of_finite)


def of_kind(kind: str, of_finite: Callable[[Any], Values]) -> Callable[[Layers], Column]:
    """Return the column of a figure over all tensors of one kind."""
    return lambda layers: layers.part(kind, figure(layers.tensors.totals, of_finite))


def of_known(of: Callable[[Rows], Values]) -> Callable[[Layers], Column]:
    """Return the column of a figure over some of the outputs; unknown where it is NaN."""
    return lambda layers: Column(values := of(layers.outputs.rows), ~np.isnan(values))


@once
def grad_norm(layers: Layers) -> Column:
    record, norms = layers.record, layers.record.module_grad_norms
    present = np.bincount(record.layout.owners, record.grad_present, len(norms))
    return Column(norms, (present > 0) & (not record.skipped))


def grad_rms(layers: Layers) -> Column:
    record, (norms, known) = layers.record, grad_norm(layers)
    sizes = record.grad_present * record.layout.sizes
    elements = np.bincount(record.layout.owners, sizes, len(norms))
    return Column(norms / np.sqrt(np.maximum(elements, 1)), known)


def grad_share(layers: Layers) -> Column:
    norms, known = grad_norm(layers)
    squares = np.square(norms)
    total = squares.sum()
    return Column(squares / (total or math.nan), known & (total != 0))


def update_ratio(layers: Layers) -> Column:
    """Return the update ratio, without parameters of zeros, which have none."""
    record, weights = layers.record, layers.weights
    ratios = np.array([record.update_ratios.get(name, math.nan) for name in record.weights])
    squares, _ = figure(weights.rows, lambda rows: rows.sum_squares)
    counts = (squares != 0) & ~(np.isnan(ratios) & np.isfinite(squares))
    parts = np.where(counts, [ratios**2 * squares, squares, counts], 0.0)
    moved, size, count = weights.total(parts)
    return Column(np.sqrt(moved / size), count > 0)


TRAINING_STATES = (
    "trains",
    "learning rate 0",
    "no gradient",
    "not in an optimizer",
    "frozen",
)
"""Texts of the numbers of :func:`training_state`."""


def training_state(layers: Layers) -> Column:
    """Return which of :data:`TRAINING_STATES` a layer's parameters have, the lowest of them.

    Unknown for layers without parameters, and at steps that are not measured in full.
    """
    record, layout = layers.record, layers.record.layout
    count, states = len(layout.modules), np.zeros(len(layout.parameters))
    if len(record.trainable) != len(states):
        return Column(np.full(count, math.nan), np.zeros(count, bool))
    if len(record.groups) == len(states):
        states[record.parameter_rates == 0] = 1
    states[~record.reached] = 2
    states[~record.held] = 3
    states[~record.trainable] = 4
    lowest = np.full(count, math.inf)
    np.minimum.at(lowest, layout.owners, states)
    return Column(lowest, np.isfinite(lowest))


def by_module(layers: Layers, values: Mapping[str, float]) -> Column:
    """Return the column of a figure that only some modules have, by their names."""
    count, position = layers.outputs.size, layers.record.layout.position
    column = Column(np.full(count, math.nan), np.zeros(count, bool))
    for name, value in values.items():
        column.values[position[name]], column.known[position[name]] = value, True
    return column


def rank_spread(layers: Layers) -> Column:
    """Return the spread over ranks; unknown if one rank measured it or all ranks are equal."""
    ranks, spreads = layers.record.ranks, dict[str, float]()
    for output, spread in ranks.activation_rms.items() if ranks else ():
        if not output.place and spread.low_rank != spread.high_rank:
            ratio = 0.0 if math.isinf(spread.high) else spread.low / spread.high
            spreads[output.module_name] = 1 - ratio
    return by_module(layers, spreads)


def of_heads(of: Callable[[AttentionHeads], float]) -> Callable[[Layers], Column]:
    """Return the column of a figure over the heads of each layer's attention."""
    return lambda layers: by_module(
        layers, {name: of(heads) for name, heads in layers.record.attention.items()}
    )


def mean_entropy(heads: AttentionHeads) -> float:
    known = heads.entropy[~np.isnan(heads.entropy)]
    return float(known.mean()) if known.size else math.nan


def saturation(layers: Layers) -> Column:
    types = [module.type_name for module in layers.record.layout.modules]
    return of_known(lambda rows: saturated_shares(types, rows))(layers)


def underflow(kind: str) -> Callable[[Layers], Column]:
    """Return the column of the share of values other than zero that 8-bit floats lose."""
    return lambda layers: layers.part(kind, _underflow(layers))


@once
def _underflow(layers: Layers) -> Column:
    lost, values = layers.tensors.total(np.array(_lost_in_fp8(layers.tensors.rows)))
    return Column(lost / values, values > 0)


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


def outlier_ratio(rows: Rows) -> Values:
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


def nonfinite(layers: Layers) -> Column:
    totals = layers.tensors.totals
    figures = np.array([moments.nonfinite_of(totals), totals.calls]).reshape(2, len(KINDS), -1)
    counts, calls = figures[:, : KINDS.index("second_moments")].sum(axis=1)
    return Column(counts, calls > 0)


def of_loads(of: Callable[[NDArray[np.float64]], float]) -> Callable[[Layers], Column]:
    """Return the column of a figure over the shares of a router's experts, which add up to 1."""

    def column(layers: Layers) -> Column:
        loads, position = layers.record.expert_loads, layers.record.layout.position
        some = {name: load for name, load in loads.items() if name in position and load.any()}
        return by_module(layers, {name: of(load / load.sum()) for name, load in some.items()})

    return column


def effective(shares: NDArray[np.float64]) -> float:
    some = shares[shares > 0]
    return math.exp(-(some @ np.log(some)))

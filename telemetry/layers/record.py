"""Gathers what was measured of all layers at one step from the step's record.

A layer is a module. This file decides which module an output belongs to, and which one owns a
parameter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.module_types import BOUNDED
from telemetry.records import Output, StepRecord, TensorRecord
from telemetry.records.buckets import bucket_of
from telemetry.records.moments import FIGURES, finite_of, merge_figures, nonfinite_of, norm_of
from telemetry.records.tensor import Tensors

Column = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""One number per layer and whether it was measured, ``[modules]`` each; NaN where it was not."""

Formula = Callable[[Any], Any]
"""Computes a number for each row of :class:`~telemetry.records.rows.Rows`, or of its figures."""


class Group(NamedTuple):
    """The tensors of one kind, those of a layer put together.

    Attributes:
        figures: Of each layer that has any, what was measured: rows, or their figures alone.
        at: The indices of these layers.
        size: How many layers there are.
    """

    figures: Any
    at: NDArray[np.intp]
    size: int

    def column(self, values: Any, known: Any = True) -> Column:
        """Values of the group's layers, as far as known."""
        column, is_known = np.full(self.size, math.nan), np.zeros(self.size, np.bool_)
        is_known[self.at] = known
        column[self.at] = np.where(known, values, math.nan)
        return column, is_known

    def figure(self, formula: Formula) -> Column:
        """A mean or norm over all elements, whereas a formula's own is over the finite ones.

        NaN if an element is NaN, infinity if one is infinite; not known of no elements.
        """
        return self.column(figure(self.figures, formula), self.figures.count > 0)

    def known(self, formula: Formula) -> Column:
        """A figure that counts only some of the values; not known where it is NaN."""
        values = formula(self.figures)
        return self.column(values, ~np.isnan(values))


def figure(rows: Any, formula: Formula) -> NDArray[np.float64]:
    """As :meth:`Group.figure`, of each row."""
    not_finite = np.where(rows.nan_count > 0, math.nan, math.inf)
    values: NDArray[np.float64] = np.where(nonfinite_of(rows) > 0, not_finite, formula(rows))
    return values


class Layers:
    """What was measured of each layer at one step, in the order of ``record.layout.modules``."""

    def __init__(self, record: StepRecord) -> None:
        self._record, self._layout = record, record.layout
        self.size = len(record.layout.modules)

    @cached_property
    def outputs(self) -> Group:
        """What each module returned."""
        return self._of_outputs(self._record.outputs)

    @cached_property
    def output_grads(self) -> Group:
        """The gradients with respect to that."""
        return self._of_outputs(self._record.output_grads)

    @cached_property
    def weights(self) -> Group:
        """Its parameters before the step."""
        return self._of_parameters(self._record.weights)

    @cached_property
    def grads(self) -> Group:
        """Their gradients."""
        return self._of_parameters(self._record.grads)

    @cached_property
    def second_moments(self) -> Group:
        """Adam's running means of the squared gradients, after the step."""
        return self._of_parameters(self._record.second_moments)

    def _of_outputs(self, outputs: Mapping[Output, TensorRecord]) -> Group:
        position = self._layout.position
        of = np.array([position[output.module_name] for output in outputs], np.intp)
        at, places = np.unique(of, return_inverse=True)
        return Group(Tensors.of(outputs).rows.merged(places, len(at)), at, self.size)

    def _of_parameters(self, parameters: Mapping[str, TensorRecord]) -> Group:
        of = self._owners(parameters)
        order = np.argsort(of, kind="stable")
        at, starts = np.unique(of[order], return_index=True)
        columns = {name: column[order] for name, column in _figures(parameters).items()}
        merged = merge_figures(columns, starts) if len(at) else columns
        return Group(SimpleNamespace(**merged), at, self.size)

    def _owners(self, parameters: Mapping[str, TensorRecord]) -> NDArray[np.intp]:
        place = self._layout.parameter_position
        return self._layout.owners[[place[name] for name in parameters]]

    # --- figures that are not those of one group --------------------------------------------------

    @cached_property
    def grad_norm(self) -> Column:
        """L2 norm of the gradients of the parameters; not known where none had a gradient."""
        known = self._grad_size > 0
        return np.where(known, self._record.module_grad_norms, math.nan), known

    @property
    def grad_rms(self) -> Column:
        """Root mean square of the gradients of the parameters."""
        norm, known = self.grad_norm
        with np.errstate(divide="ignore", invalid="ignore"):
            return norm / np.sqrt(self._grad_size), known

    @cached_property
    def _grad_size(self) -> NDArray[np.float64]:
        """Number of elements of these gradients."""
        present = self._record.grad_present & (not self._record.skipped)
        sizes = self._layout.sizes[present]
        of = self._layout.owners[present]
        return np.bincount(of, sizes, minlength=self.size).astype(np.float64)

    @property
    def saturation(self) -> Column:
        """Share of a module's finite outputs that lie where its activation function is flat."""
        kinds = [BOUNDED.get(module.type_name) for module in self._layout.modules]
        lows = np.array([bucket_of(k.flat.low) if k else -math.inf for k in kinds])
        highs = np.array([bucket_of(k.flat.high) if k else math.inf for k in kinds])
        rows, at, _ = self.outputs
        of = at.repeat(rows.bucket_count)
        flat = (rows.buckets <= lows[of]) | (rows.buckets >= highs[of])
        counts = np.bincount(of[flat], rows.counts[flat], minlength=self.size)[at]
        finite = finite_of(rows)
        known = np.isfinite(highs - lows)[at] & (finite > 0)
        return self.outputs.column(counts / np.maximum(finite, 1), known)

    @property
    def update_ratio(self) -> Column:
        """``||after - before|| / ||before||`` of the parameters as one vector.

        Parameters that were all zeros are left out, because they have no ratio.
        """
        weights, ratios = self._record.weights, self._record.update_ratios
        rows = Tensors.of(weights).rows
        norm = figure(rows, norm_of)
        ratio = np.array([ratios.get(name, math.nan) for name in weights])
        some = (rows.count > 0) & (norm != 0) & ~(np.isnan(ratio) & np.isfinite(norm))
        of, norm, ratio = self._owners(weights)[some], norm[some], ratio[some]
        with np.errstate(all="ignore"):
            moved, size = (
                np.sqrt(np.bincount(of, squares, minlength=self.size))
                for squares in ((ratio * norm) ** 2, norm**2)
            )
            return (
                np.where(np.isinf(size), math.nan, moved / size),
                np.bincount(of, minlength=self.size) > 0,
            )

    @property
    def rank_spread(self) -> Column:
        """How much smaller the least RMS of an output on any rank is than the largest, 0 to 1.

        Not known on one rank, and where one alone measured it or all have the same.
        """
        ranks = self._record.ranks
        spreads = {} if ranks is None else ranks.activation_rms
        values = np.full(self.size, math.nan)
        for index, module in enumerate(self._layout.modules if spreads else ()):
            spread = spreads.get(Output(module.name))
            if spread is not None and spread.low_rank != spread.high_rank:
                infinite = math.isinf(spread.high)
                values[index] = 1.0 if infinite else 1 - spread.low / spread.high
        return values, ~np.isnan(values)

    @property
    def nonfinite_count(self) -> Column:
        """Number of NaN and infinite elements in outputs, parameters and the gradients of both."""
        groups = (self.outputs, self.output_grads, self.weights, self.grads)
        counts, known = np.zeros(self.size), np.zeros(self.size, np.bool_)
        for group in groups:
            counts[group.at] += nonfinite_of(group.figures)
            known[group.at] = True
        return np.where(known, counts, math.nan), known


def _figures(parameters: Mapping[str, TensorRecord]) -> dict[str, Any]:
    rows = Tensors.of(parameters).rows
    return {name: getattr(rows, name) for name in FIGURES}

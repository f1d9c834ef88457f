"""Compare two runs: the first step and layer where each statistic and curve differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.plain_text import called
from telemetry.reading.builtin_tags import MAX_RATES, scalar_curves
from telemetry.reading.matrix import WHOLE
from telemetry.reading.run_data import RunData
from telemetry.records.loss import loss_among
from telemetry.records.step import INPUT, is_inside

_FORWARD, _BACKWARD, _UPDATE = 1, 2, 3
# A share of all gradients differs in every layer if one differs.
_COMPARED = [statistic for statistic in PAGE_STATISTICS if statistic.name != "grad_share"]

# Order of statistics within a step; the others belong to the forward pass.
ARISES = {
    **dict.fromkeys(("weight_norm", "weight_rms"), 0),
    **dict.fromkeys(("activation_grad_rms", "grad_norm", "grad_rms"), _BACKWARD),
    **dict.fromkeys(("update_ratio", "second_moment_rms", "nonfinite"), _UPDATE),
}


@dataclass(frozen=True)
class Difference:
    """First step at which one statistic differs, and its value in both runs."""

    statistic: str  # its name, ``loss``, or the tag of another curve
    step: int
    module_name: str | None  # the first differing module in order of computation; None for a curve
    first: float
    second: float
    layer_count: int  # layers that differ at this step; 0 for a curve

    @property
    def where(self) -> str:
        """The module, to follow the statistic in a sentence; empty for a curve."""
        return "" if self.module_name is None else f" in {called(self.module_name)}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of comparing two runs: at most one difference per statistic and curve, in order."""

    differences: Sequence[Difference]
    step_count: int  # that both runs recorded
    layer_count: int  # that both runs have, without the rows of the input
    only_first: Sequence[str]  # names of the first run's other layers
    only_second: Sequence[str]


def compare(first: RunData, second: RunData, *, tolerance: float = 0.0) -> Comparison:
    """Compare common steps and layers; ``tolerance`` is relative, and NaN is the same as NaN."""
    names = [[layer.name for layer in run.layers] for run in (first, second)]
    known = [set(of_run) for of_run in names]
    both = [name for name in names[0] if name in known[1]]
    found, step_count = _of_layers(first, second, both, tolerance)
    found += _of_curves(first, second, tolerance)
    return Comparison(
        differences=sorted(found, key=lambda d: (d.step, ARISES.get(d.statistic, _FORWARD))),
        step_count=step_count,
        layer_count=sum(not is_inside(name, INPUT) for name in both),
        only_first=[name for name in names[0] if name not in known[1]],
        only_second=[name for name in names[1] if name not in known[0]],
    )


def _of_layers(
    first: RunData, second: RunData, names: Sequence[str], tolerance: float
) -> tuple[list[Difference], int]:
    """Return the first difference of each statistic, and the number of common steps."""
    rows = []
    for run in (first, second):
        row_of = {layer.name: row for row, layer in enumerate(run.layers)}
        rows.append(np.array([row_of[name] for name in names], np.intp))
    found: list[Difference] = []
    steps = np.empty(0, np.int64)
    for statistic in _COMPARED:
        of_runs = [run.matrix(statistic.name) for run in (first, second)]
        common, *columns = np.intersect1d(
            of_runs[0].steps, of_runs[1].steps, assume_unique=True, return_indices=True
        )
        steps = np.union1d(steps, common)
        one, other = (of_runs[i].values[columns[i]][:, rows[i]] for i in (0, 1))
        differ = (one != MISSING) & (other != MISSING) & ~_same(one, other, tolerance)
        if differ.any():
            column = int(differ.any(axis=1).argmax())
            layers = np.flatnonzero(differ[column])
            row = layers[-1 if ARISES.get(statistic.name) == _BACKWARD else 0]
            both_values = float(one[column, row]), float(other[column, row])
            found.append(
                Difference(
                    statistic.name, int(common[column]), names[row], *both_values, len(layers)
                )
            )
    return found, len(steps)


def _same(
    first: NDArray[np.float32], second: NDArray[np.float32], tolerance: float
) -> NDArray[np.bool_]:
    same: NDArray[np.bool_] = (first == second) | (np.isnan(first) & np.isnan(second))
    if tolerance:  # relative to either
        one, other = first.astype(np.float64), second.astype(np.float64)
        same |= np.isclose(one, other, tolerance, 0.0) | np.isclose(other, one, tolerance, 0.0)
    return same


def _curves(run: RunData) -> Mapping[str, Mapping[int, float]]:
    """Return loss and learning rates by name and step; the loss is named ``loss``.

    TensorBoard's curves would lack most steps of a rate. They have the loss that a program logs
    with a writer of its own.
    """
    logged, found = run.logged(), defaultdict[str, dict[int, float]](dict)
    loss = run.loss_tag() or loss_among(logged)
    if loss in logged:
        found["loss"] = dict(logged[loss])
    else:
        tags = [tag for kind, tag in scalar_curves(run) if kind == "loss"]
        found["loss"] = {
            step: v for of in run.source.read("scalars", tags).values() for step, v in of
        }
    for frame in run.norms(WHOLE):
        for group, rate in enumerate(frame.learning_rates[:MAX_RATES]):
            found[f"learning_rate/{group}"][frame.step] = rate
    return found


def _of_curves(first: RunData, second: RunData, tolerance: float) -> Iterator[Difference]:
    read = [_curves(run) for run in (first, second)]
    for name in read[0]:
        one, other = (curves.get(name, {}) for curves in read)
        steps = sorted(one.keys() & other.keys())
        first_values = np.array([one[step] for step in steps], np.float32)
        second_values = np.array([other[step] for step in steps], np.float32)
        for place in np.flatnonzero(~_same(first_values, second_values, tolerance))[:1]:
            step = steps[place]
            yield Difference(name, step, None, one[step], other[step], 0)

"""The statistics of layers: columns of the page's data, or computed from gradient norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.reading.matrix import in_order
from telemetry.reading.numbers import Numbers
from telemetry.reading.sessions import Segment

EVERY_STEP = tuple(statistic.name for statistic in PAGE_STATISTICS if statistic.every_step)
"""Statistics that are computed from the parameters' gradient norms, ``n`` tags."""

Curves: TypeAlias = dict[str, Numbers]
"""Steps and values, shape ``[k]`` each, by the name of what has them."""


def layer_series(
    name: str,
    full: Iterable[tuple[Segment, Numbers]],
    norms: Iterable[tuple[Segment, Numbers]],
) -> tuple[Curves, Curves]:
    """All statistics of the layer with this name, and the gradient norm of each of its parameters.

    Curves that have no value are left out.

    Args:
        name: The layer's.
        full: The content of all ``m`` tags.
        norms: That of all ``n`` tags.
    """
    statistics: dict[str, list[Numbers]] = defaultdict(list)
    parameters: dict[str, list[Numbers]] = defaultdict(list)
    for segment, (steps, values) in full:
        place = segment.layout.position.get(name)
        if place is not None:
            for column, statistic in enumerate(segment.statistic_names):
                statistics[statistic].append((steps, values[:, place, column]))
    for segment, (steps, values) in norms:
        place = segment.layout.position.get(name)
        if place is not None:
            own = segment.layout.owned[place]
            for statistic in EVERY_STEP:
                one = np.zeros(len(own), np.intp)
                of_one = _from_norms(values[:, own], segment.sizes[own], one, 1, statistic)
                statistics[statistic].append((steps, of_one[:, 0]))
            for index in own:
                parameters[segment.layout.parameters[index].name].append((steps, values[:, index]))
    return _joined(statistics), _joined(parameters)


def of_modules(
    segment: Segment, values: NDArray[np.float32], name: str
) -> NDArray[np.float32] | None:
    """One statistic of the segment's modules, ``[k, modules]``; None if the segment lacks it.

    Args:
        segment: The segment.
        values: The numbers of one of its ``n`` tags for a statistic of :data:`EVERY_STEP`, of one
            of its ``m`` tags for another.
        name: The statistic's name.
    """
    if name in EVERY_STEP:
        layout = segment.layout
        return _from_norms(values, segment.sizes, layout.owners, len(layout.modules), name)
    if name not in segment.statistic_names:
        return None
    return values[:, :, segment.statistic_names.index(name)]


def _from_norms(
    norms: NDArray[np.float32],
    sizes: NDArray[np.float64],
    owners: NDArray[np.intp],
    count: int,
    name: str,
) -> NDArray[np.float32]:
    """``grad_norm`` or ``grad_rms``; missing where no parameter of the module had a gradient."""
    order = np.argsort(owners, kind="stable")
    modules, starts = np.unique(owners[order], return_index=True)

    def sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Over each module's parameters, ``[k, modules]``."""
        found = np.zeros((len(values), count))
        if len(order):
            found[:, modules] = np.add.reduceat(values[:, order], starts, axis=1)
        return found

    present = norms != MISSING
    total = sums(np.where(present, np.square(norms, dtype=np.float64), 0.0))
    if name == "grad_rms":
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / sums(present * sizes)
    known = sums(present.astype(np.float64)) > 0
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(known, np.sqrt(total), MISSING).astype(np.float32)


def _joined(pieces: dict[str, list[Numbers]]) -> Curves:
    joined = {}
    for name, parts in pieces.items():
        steps, values = (np.concatenate(column) for column in zip(*parts, strict=True))
        known = values != MISSING
        if known.any():
            joined[name] = in_order(steps[known], values[known])
    return joined

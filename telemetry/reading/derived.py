"""The statistics of layers: columns of the page's data, or computed from gradient norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.reading.matrix import in_order
from telemetry.reading.sessions import Segment

EVERY_STEP = tuple(statistic.name for statistic in PAGE_STATISTICS if statistic.every_step)
"""Statistics that are computed from the parameters' gradient norms, ``n`` tags."""

Series = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Steps and values, shape ``[k]`` each."""

ByOwner = tuple[Any, NDArray[np.intp], NDArray[np.intp]]
"""As in :class:`~telemetry.reading.sessions.Segment`."""

_ONE: ByOwner = (slice(None), np.zeros(1, np.intp), np.zeros(1, np.intp))
"""All parameters are of one module."""

Part = tuple[Segment, NDArray[np.int64], NDArray[np.float32]]
"""What a tag holds: its segment, its steps ``[k]``, and for each of them the numbers of an ``m``
tag, ``[k, modules, statistics]``, or of an ``n`` tag, ``[k, parameters]``."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSeries:
    """Everything about one layer over time, without curves that have no value.

    Attributes:
        statistics: By the statistic's name.
        parameters: The gradient norm of each parameter, by the parameter's name.
    """

    statistics: dict[str, Series]
    parameters: dict[str, Series]


def layer_series(name: str, full: Iterable[Part], norms: Iterable[Part]) -> LayerSeries:
    """All curves of the layer with this name, from all ``m`` tags and all ``n`` tags."""
    statistics: dict[str, list[Series]] = defaultdict(list)
    parameters: dict[str, list[Series]] = defaultdict(list)
    for segment, steps, values in full:
        place = segment.layout.position.get(name)
        if place is not None:
            for column, statistic in enumerate(segment.statistic_names):
                statistics[statistic].append((steps, values[:, place, column]))
    for segment, steps, values in norms:
        place = segment.layout.position.get(name)
        if place is not None:
            own = np.flatnonzero(segment.owners == place)
            for statistic in EVERY_STEP:
                of_one = _from_norms(values[:, own], segment.sizes[own], _ONE, 1, statistic)
                statistics[statistic].append((steps, of_one[:, 0]))
            for index in own:
                parameters[segment.layout.parameters[index].name].append((steps, values[:, index]))
    return LayerSeries(statistics=_joined(statistics), parameters=_joined(parameters))


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
        count = len(segment.layout.modules)
        return _from_norms(values, segment.sizes, segment.by_owner, count, name)
    if name not in segment.statistic_names:
        return None
    return values[:, :, segment.statistic_names.index(name)]


def _from_norms(
    norms: NDArray[np.float32], sizes: NDArray[np.float64], by_owner: ByOwner, count: int, name: str
) -> NDArray[np.float32]:
    """``grad_norm`` or ``grad_rms``; missing where no parameter of the module had a gradient."""
    present = norms != MISSING
    squares = np.where(present, np.square(norms, dtype=np.float64), 0.0)
    total = _sums(squares, by_owner, count)
    if name == "grad_rms":
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / _sums(present * sizes, by_owner, count)
    known = _sums(present.astype(np.float64), by_owner, count) > 0
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(known, np.sqrt(total), MISSING).astype(np.float32)


def _sums(values: NDArray[np.float64], by_owner: ByOwner, count: int) -> NDArray[np.float64]:
    """Sums over each module's parameters, ``[k, modules]``."""
    sums = np.zeros((len(values), count))
    order, present, starts = by_owner
    if values.shape[1]:
        sums[:, present] = np.add.reduceat(values[:, order], starts, axis=1)
    return sums


def _joined(pieces: dict[str, list[Series]]) -> dict[str, Series]:
    joined = {}
    for name, parts in pieces.items():
        steps = np.concatenate([steps for steps, _ in parts])
        values = np.concatenate([values for _, values in parts])
        known = values != MISSING
        if known.any():
            joined[name] = in_order(steps[known], values[known])
    return joined

"""Derives layer statistics from the parameters' gradient norms, and builds one layer's curves."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from telemetry.layers import MISSING
from telemetry.reading.matrix import in_order
from telemetry.reading.sessions import Segment

Series = tuple[NDArray[np.int64], NDArray[np.float32]]


def gradient_statistic(
    segment: Segment, norms: NDArray[np.float32], name: str
) -> NDArray[np.float32]:
    """``grad_norm`` or ``grad_rms`` of each module.

    Args:
        segment: The segment that the norms are from; its layout says which module owns a parameter.
        norms: The norm of each parameter's gradient, shape ``[k, parameters]``.
        name: The statistic's name.

    Returns:
        Shape ``[k, modules]``; missing where no parameter of the module had a gradient.
    """
    present = norms != MISSING
    squares = np.where(present, np.square(norms, dtype=np.float64), 0.0)
    total = _sum_by_owner(segment, squares)
    if name == "grad_rms":
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / _sum_by_owner(segment, present * segment.sizes)
    known = _sum_by_owner(segment, present.astype(np.float64)) > 0
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(known, np.sqrt(total), MISSING).astype(np.float32)


def _sum_by_owner(segment: Segment, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sums over each module's parameters, ``[k, modules]``."""
    sums = np.zeros((len(values), len(segment.layout.modules)))
    owners = segment.owners
    if len(owners):
        order = np.argsort(owners, kind="stable")
        present, starts = np.unique(owners[order], return_index=True)
        sums[:, present] = np.add.reduceat(values[:, order], starts, axis=1)
    return sums


class SeriesBuilder:
    """Collects the curves of one layer from pieces in the order of steps."""

    def __init__(self) -> None:
        self._statistics: dict[str, list[Series]] = defaultdict(list)
        self._parameters: dict[str, list[Series]] = defaultdict(list)

    def add_matrix(
        self, segment: Segment, place: int, steps: NDArray[np.int64], values: NDArray[np.float32]
    ) -> None:
        """Adds values of an ``m`` tag, ``[k, modules, statistics]``."""
        for column, name in enumerate(segment.statistic_names):
            self._statistics[name].append((steps, values[:, place, column]))

    def add_norms(
        self, segment: Segment, place: int, steps: NDArray[np.int64], norms: NDArray[np.float32]
    ) -> None:
        """Adds norms of an ``n`` tag, ``[k, parameters]``."""
        for name in ("grad_norm", "grad_rms"):
            of_modules = gradient_statistic(segment, norms, name)
            self._statistics[name].append((steps, of_modules[:, place]))
        for index in np.flatnonzero(segment.owners == place):
            name = segment.layout.parameters[index].name
            self._parameters[name].append((steps, norms[:, index]))

    def statistics(self) -> dict[str, Series]:
        return _joined(self._statistics)

    def parameters(self) -> dict[str, Series]:
        return _joined(self._parameters)


def _joined(pieces: dict[str, list[Series]]) -> dict[str, Series]:
    """Each curve in one piece, without those that have no value."""
    joined = {}
    for name, parts in pieces.items():
        steps = np.concatenate([steps for steps, _ in parts])
        values = np.concatenate([values for _, values in parts])
        known = values != MISSING
        if known.any():
            joined[name] = in_order(steps[known], values[known])
    return joined

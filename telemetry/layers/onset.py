"""Onset: the step at which a layer's gradient norm left its baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

# Median absolute deviation to standard deviation, for a normal distribution.
NORMAL_CONSISTENT = 1.4826  # 1 / (3rd quartile of the standard normal distribution)

LOOK_BACK = 120  # a window of a hundred steps, as in the baseline, and the latest 20
LEAD = 10  # chosen manually: instability shows in the norms a few steps before the loss

# Steps in the baseline of the page's answer, which needs fewer than an alert.
FEWEST_TO_SHOW = 8
_DEVIATIONS = 4.0  # equal to that of the loss in the baseline
_DECADES = 0.3  # a factor of two


@dataclass(frozen=True, kw_only=True)
class Onset:
    """Onset of a layer."""

    name: str
    step: int  # at which the gradient norm left its baseline
    factor: float  # its norm at that step, as a multiple of the usual one; below 1 if it fell


def onsets(
    names: Sequence[str],
    steps: Sequence[int] | NDArray[np.int64],
    norms: ArrayLike,
    since: int,
    *,
    fewest: int = 20,
    lead: float = LEAD,
) -> list[Onset] | None:
    """Return the layers whose norm left its baseline at step ``since`` or later, earliest first.

    The baseline is the median of the steps more than ``lead`` before ``since``, within four
    standard deviations and a factor of two. If a norm rises and then falls below it, the onset is
    the rise. None if the baseline has fewer than ``fewest`` steps, or no step follows it.

    Args:
        steps: Ascending, shape ``[k]``.
        norms: Norm of each layer at each step, ``[k, layers]``; NaN where unknown. Layers with
            unknown norms in the baseline are omitted.
    """
    steps = np.asarray(steps)
    is_past = steps < since - lead
    if is_past.sum() < fewest or is_past.all():
        return None
    with np.errstate(divide="ignore"):
        logarithms = np.log10(np.asarray(norms, np.float64))
    past, now, steps = logarithms[is_past], logarithms[~is_past], steps[~is_past]
    usual = np.median(past, axis=0)
    with np.errstate(invalid="ignore"):
        deviation = NORMAL_CONSISTENT * np.median(np.abs(past - usual), axis=0)
        off = now - usual
        is_off = np.abs(off) > np.maximum(_DEVIATIONS * deviation, _DECADES)
    changes = []
    for column in np.flatnonzero(np.isfinite(usual)).tolist():
        first = _begins(is_off[:, column], steps, since)
        if first is not None:
            distance = float(off[first, column])
            onset = Onset(name=names[column], step=int(steps[first]), factor=10**distance)
            changes.append((onset.step, -abs(distance), onset))
    return [onset for *_, onset in sorted(changes, key=lambda item: item[:2])]


_CROSSES = 3  # steps: a norm that rises and then falls far is usual for one or two in between


def _begins(is_off: NDArray[np.bool_], steps: NDArray[np.int64], since: int) -> int | None:
    """Return the index of the first step of the unusual interval at or after ``since``."""
    unusual = np.flatnonzero(is_off)
    later = np.flatnonzero(steps[unusual] >= since)
    if not later.size:
        return None
    first = int(later[0])
    while first > 0 and unusual[first] - unusual[first - 1] <= _CROSSES:
        first -= 1
    return int(unusual[first])

"""Which layers of a recorded run left their past first around a step."""

from __future__ import annotations

import numpy as np

from telemetry.layers import MISSING
from telemetry.movers import FEWEST_TO_SHOW, LOOK_BACK, Mover, movers
from telemetry.reading.matrix import Region
from telemetry.reading.run_data import RunData


def first_movers(run: RunData, step: int) -> list[Mover] | None:
    """The layers whose gradient norm had left its past by a step, earliest first.

    NaN counts as infinite. What came after the step is left out: at the end of an explosion all
    layers are NaN alike.

    Args:
        run: The run.
        step: An optimizer step.

    Returns:
        None if there are too few steps before to know what is usual.
    """
    region = Region(first_step=max(0, step + 1 - LOOK_BACK), last_step=step)
    matrix = run.matrix("grad_norm", region)
    norms = np.where(np.isnan(matrix.values), np.inf, matrix.values).astype(np.float64)
    norms[norms == MISSING] = np.nan
    names = [layer.name for layer in run.overview().layers]
    return movers(names, matrix.steps, norms, step, fewest=FEWEST_TO_SHOW)

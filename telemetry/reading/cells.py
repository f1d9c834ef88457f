"""All numbers of a run as rows of a table: one for each layer and step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from telemetry.layers import MISSING
from telemetry.reading.run_data import RunData
from telemetry.reading.windows import windows


def cells(run: RunData, statistics: Sequence[str]) -> Iterator[list[str]]:
    """Step, layer, class and one text per statistic, by step and then in forward order.

    A number has as many digits as float32 needs; where it was not measured, the text is empty. Rows
    without any number are left out.

    Args:
        run: The run.
        statistics: Names of statistics that the page shows.
    """
    layers = run.overview().layers
    for [matrices] in windows([run], statistics):
        rows_of = [dict(zip(m.steps.tolist(), m.values, strict=True)) for m in matrices]
        nothing = np.full(len(layers), MISSING, np.float32)
        for step in sorted(set().union(*rows_of)):
            values = np.stack([rows.get(step, nothing) for rows in rows_of], axis=1)
            texts = np.where(values == MISSING, "", values.astype(str))
            for place in np.flatnonzero((values != MISSING).any(axis=1)):
                layer = layers[place]
                yield [str(step), layer.name, layer.type_name, *texts[place].tolist()]

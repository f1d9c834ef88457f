"""The spread of statistics over all layers, as a few curves.

A chart of the 5 %, 50 % and 95 % quantiles shows at a glance whether layers drift apart, whatever
the model. Where magnitudes matter, the curves are of log10: TensorBoard's charts have a linear
axis, on which all small gradients look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from telemetry.events import summaries
from telemetry.layers import STATISTICS, Statistic, table
from telemetry.records import StepRecord
from telemetry.tag_names import RUN

QUANTILES: Mapping[str, float] = {"p05": 0.05, "median": 0.5, "p95": 0.95}
SPREADS: Mapping[str, Statistic] = {
    f"log10_{statistic.name}" if statistic.log else statistic.name: statistic
    for statistic in STATISTICS
    if statistic.as_spread
}
"""The statistics with such curves, by the name in their tags."""


def values_of(record: StepRecord) -> Iterator[bytes]:
    """``~run/depth/<name>/p05``, ``median`` and ``p95`` of a full step.

    Quantiles are over the finite values of all layers; those of a logarithm, over the positive
    ones. A statistic without any such value has no points.
    """
    if not record.full or record.phase or record.skipped:
        return
    layers = table(record)
    for name, statistic in SPREADS.items():
        values = layers.known_values(statistic.name)
        values = np.sort(values[np.isfinite(values) & (values > 0 if statistic.log else True)])
        if values.size:
            values = np.log10(values) if statistic.log else values
            # Like numpy.quantile, which takes ten times as long.
            places = np.array(list(QUANTILES.values())) * (values.size - 1)
            quantiles = np.interp(places, np.arange(values.size), values)
            for quantile, value in zip(QUANTILES, quantiles.tolist(), strict=True):
                yield summaries.scalar(f"{RUN}depth/{name}/{quantile}", value)

"""How statistics are spread over the depth of the network, as a few curves.

They go beside the curves of single layers: a chart of 5 %, 50 % and 95 % shows at a glance whether
the layers drift apart, whichever layers there are. Where magnitudes count it is log10 that is
written: TensorBoard's charts have a linear axis, on which all small gradients look alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events import summaries
from telemetry.layers import STATISTICS, Statistic, table
from telemetry.records import StepRecord

QUANTILES: Mapping[str, float] = {"p05": 0.05, "median": 0.5, "p95": 0.95}
SPREADS: Mapping[str, Statistic] = {
    f"log10_{statistic.name}" if statistic.log else statistic.name: statistic
    for statistic in STATISTICS
    if statistic.as_spread
}
"""Statistics that are drawn so, by the name that their tags have."""


def values_of(record: StepRecord) -> Iterator[Summary.Value]:
    """``depth/<name>/p05``, ``median`` and ``p95`` of a step that is measured in full.

    Over all layers of which the statistic was measured, of what is finite, and has a logarithm
    where that is written; nothing for a statistic without any.
    """
    if not record.full or record.phase or record.skipped:
        return
    layers = table(record)
    for name, statistic in SPREADS.items():
        values = layers.known_values(statistic.name)
        if statistic.log:
            values = np.log10(values[values > 0])
        finite = values[np.isfinite(values)]
        if finite.size:
            quantiles = np.quantile(finite, list(QUANTILES.values()))
            for quantile, value in zip(QUANTILES, quantiles, strict=True):
                yield summaries.scalar(f"depth/{name}/{quantile}", float(value))

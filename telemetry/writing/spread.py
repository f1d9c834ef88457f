"""The spread of statistics over all layers, as a few curves.

A chart of the 5 %, 50 % and 95 % quantiles shows at a glance whether layers drift apart, whatever
the model. Where magnitudes matter, the curves are of log10: TensorBoard's charts have a linear
axis, on which all small gradients look alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

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
        known = filter(math.isfinite, layers.known_values(statistic.name).tolist())
        values = sorted(value for value in known if value > 0 or not statistic.log)
        for quantile, value in _quantiles(values, math.log10 if statistic.log else float):
            yield summaries.scalar(f"{RUN}depth/{name}/{quantile}", value)


def _quantiles(
    values: Sequence[float], scale: Callable[[float], float]
) -> Iterator[tuple[str, float]]:
    """Like ``numpy.quantile`` of the ascending values to scale, which takes a hundred times as long
    for a few; none of none.
    """
    last = len(values) - 1
    for quantile, share in QUANTILES.items() if values else ():
        place = share * last
        below = int(place)
        low, high = scale(values[below]), scale(values[min(below + 1, last)])
        yield quantile, low + (high - low) * (place - below)

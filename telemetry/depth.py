"""How statistics are spread over the depth of the network, as a few curves.

They go beside the curves of single layers: a chart of 5 %, 50 % and 95 % shows at a glance whether
the layers drift apart, whichever layers there are. Where magnitudes count it is log10 that is
written: TensorBoard's charts have a linear axis, on which all small gradients look alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events import summaries
from telemetry.records import StepRecord

QUANTILES: Mapping[str, float] = {"p05": 0.05, "median": 0.5, "p95": 0.95}
STATISTICS = ("log10_grad_norm", "log10_update_ratio", "log10_activation_rms", "dead_units")


def values_of(record: StepRecord) -> Iterator[Summary.Value]:
    """``depth/<statistic>/p05``, ``median`` and ``p95`` of a step that is measured in full.

    Over parameters or modules, of what is finite, and has a logarithm where that is written;
    nothing for a statistic without any.
    """
    if not record.full or record.phase or record.skipped:
        return
    for statistic, values in _by_statistic(record).items():
        array = np.fromiter(values, np.float64)
        if statistic.startswith("log10"):
            array = np.log10(array[array > 0])
        finite = array[np.isfinite(array)]
        if finite.size:
            for name, value in zip(
                QUANTILES, np.quantile(finite, list(QUANTILES.values())), strict=True
            ):
                yield summaries.scalar(f"depth/{statistic}/{name}", float(value))


def _by_statistic(record: StepRecord) -> dict[str, Iterable[float]]:
    outputs = record.outputs.values()
    return dict(
        zip(
            STATISTICS,
            (
                record.grad_norms[record.grad_present].tolist(),
                record.update_ratios.values(),
                [tensor.sketch.rms for tensor in outputs],
                [tensor.dead_fraction for tensor in outputs],
            ),
            strict=True,
        )
    )

"""The charts of the Custom Scalars dashboard: what to look at first.

TensorBoard merges the charts of all runs by their titles, so tags are patterns that fit every run.
"""

from __future__ import annotations

import re

from tensorboard.plugins.custom_scalar import layout_pb2, metadata

from telemetry.events import summaries
from telemetry.records.loss import LOSS_TAGS
from telemetry.shared.tag_names import RUN
from telemetry.writing.curves import DEPTH_CURVES


def custom_scalars_value(loss: str | None = None) -> bytes:
    """The value to write once per run, at step 0.

    Args:
        loss: The loss's tag, if the user has named it.
    """
    losses = [LOSS_TAGS] if loss is None else [f"^{re.escape(loss)}$", LOSS_TAGS]
    charts = layout_pb2.Layout(
        category=[
            layout_pb2.Category(
                title="Telemetry",
                chart=[
                    _curves("Loss", *losses),
                    _curves("Alerts so far", f"^({RUN})?alerts/count$"),
                    _curves("Seconds per step", f"^{RUN}time/step_s$"),
                    *map(_margins, DEPTH_CURVES),
                ],
            ),
        ]
    )
    return summaries.tensor(
        metadata.CONFIG_SUMMARY_TAG, charts.SerializeToString(), metadata.PLUGIN_NAME
    )


def _curves(title: str, *patterns: str) -> layout_pb2.Chart:
    return layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=patterns))


def _margins(name: str) -> layout_pb2.Chart:
    prefix, statistic = f"{RUN}depth/{name}", DEPTH_CURVES[name]
    scale = " (log10)" if statistic.log else ""
    series = layout_pb2.MarginChartContent.Series(
        value=f"{prefix}/median", lower=f"{prefix}/p05", upper=f"{prefix}/p95"
    )
    return layout_pb2.Chart(
        title=f"{statistic.title}{scale}: median over all layers, 5 to 95 %",
        margin=layout_pb2.MarginChartContent(series=[series]),
    )

"""The layout of the Custom Scalars dashboard fits the tags that are written."""

from __future__ import annotations

import re

from tensorboard.plugins.custom_scalar import layout_pb2

from telemetry.writing import tags
from telemetry.writing.dashboard import custom_scalars_value, depth_values
from tests.helpers.serialized import joined, parsed, tags_of
from tests.helpers.small_records import full_record


def read_layout() -> layout_pb2.Layout:
    value = parsed(custom_scalars_value())
    assert value.tag == "custom_scalars__config__"
    return layout_pb2.Layout.FromString(value.tensor.string_val[0])


def test_every_chart_finds_its_tags_and_at_most_sixteen() -> None:
    record = full_record(0)
    written = tags_of([*joined(tags.values_of(record)), *depth_values(record)])
    written |= {"loss", "train/loss", "~run/alerts/count", "~run/time/step_s"}
    layout = read_layout()
    assert [(len(of.chart), of.closed) for of in layout.category] == [(7, False), (4, True)]
    [medians] = {len(chart.multiline.tag) for chart in layout.category[0].chart[3:]}
    assert medians == 1  # a line per run
    for chart in (chart for category in layout.category for chart in category.chart):
        series = chart.margin.series
        named = {tag for one in series for tag in (one.value, one.lower, one.upper)}
        assert named <= written, chart.title
        for pattern in chart.multiline.tag:
            assert 0 < sum(re.search(pattern, tag) is not None for tag in written) <= 16, (
                chart.title
            )

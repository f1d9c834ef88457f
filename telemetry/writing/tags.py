"""Values of a step's record for TensorBoard's own dashboards, and their tags."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.layers import PARAMETER_STATISTICS, STATISTICS, table
from telemetry.plain_text import printable
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.rows import Rows
from telemetry.records.tensor import TensorRecord, Tensors
from telemetry.selection import evenly
from telemetry.tag_names import (
    ALERTS,
    HISTOGRAMS,
    IMAGES,
    LAYERS,
    RUN,
    TOTAL_GRAD_NORM,
)
from telemetry.writing.size_budget import SizeBudget, Tagged

# Models with more parameters or modules have curves of some layers only, because TensorBoard shows
# one card for each curve.
MANY = 64
SHOWN_OF_MANY = 12


def values_of(record: StepRecord, size_budget: SizeBudget | None = None) -> Iterator[bytes]:
    """Yield the values of one step; if it is not a full step, only the total gradient norm.

    Tags are ``group/statistic/NNNN.name``, see :func:`~telemetry.tag_names.numbered`. In a phase,
    its name precedes the statistic.
    """
    prefix = f"{record.phase}/" if record.phase else ""
    if not prefix:
        for tag, value in _curves_of_run(record):
            yield summaries.scalar(tag, value)
        if not record.full:
            return
    for tag, value in _curves_of_layers(record, f"{LAYERS}{prefix}"):
        yield summaries.scalar(tag, value)
    groups = _histograms(record)
    grads = {f"{group}_log10": groups[group] for group in ("activation_grad", "grad")}
    yield from (size_budget or SizeBudget()).values_of(
        [(f"{IMAGES}{prefix}{tag}", pixels) for tag, pixels in _images(record)],
        _joined(groups, f"{HISTOGRAMS}{prefix}"),
        _joined(grads, f"{HISTOGRAMS}{prefix}"),
    )


def alert_value(alert: Alert, number: int) -> bytes:
    """An alert as a text. Each has its own tag, because TensorBoard drops texts that share one."""
    where = f".{printable(alert.module_name)}" if alert.module_name else ""
    tag = f"{ALERTS}{number:04d}.{alert.kind}{where}"
    message = alert.message.replace("\n", "  \n")  # Markdown's line break
    return summaries.text(tag, f"**{alert.severity}** at step {alert.step}\n\n{message}")


def _curves_of_run(record: StepRecord) -> Iterator[tuple[str, float]]:
    yield TOTAL_GRAD_NORM, record.total_grad_norm
    if not record.full:
        return
    if record.loss_scale is not None:
        yield f"{RUN}scaler/scale", record.loss_scale
        yield f"{RUN}scaler/skipped_steps", record.skipped_steps
    if record.total_grad_norm_before_clipping is not None:
        yield f"{TOTAL_GRAD_NORM}_before_clipping", record.total_grad_norm_before_clipping
    if record.clipped_fraction is not None:
        yield f"{RUN}grad_norm/clipped_fraction", record.clipped_fraction


def _curves_of_layers(record: StepRecord, group: str) -> Iterator[tuple[str, float]]:
    layout = record.layout
    most = SHOWN_OF_MANY if max(len(layout.parameters), len(layout.modules)) > MANY else MANY
    if not record.phase:
        names = [layout.parameters[index].name for index in layout.depth_order.tolist()]
        for name, values_by_name in PARAMETER_STATISTICS.items():
            values = values_by_name(record)
            yield from _curves(f"{group}{name}", names, layout.numbered_parameters, values, most)
    layers = table(record)
    tag_of = layout.numbered_modules
    columns, known = layers.values.T.tolist(), layers.known.T.tolist()
    for statistic, column, measured in zip(STATISTICS, columns, known, strict=True):
        if not statistic.as_curve:
            continue
        found = {
            name: value
            for name, value, is_known in zip(tag_of, column, measured, strict=True)
            if is_known and not (statistic.zero_is_silent and value == 0)
        }
        yield from _curves(f"{group}{statistic.name}", list(found), tag_of, found, most)


def _curves(
    statistic: str,
    names: Sequence[str],
    tag_of: Mapping[str, str],
    values: Mapping[str, float],
    most: int,
) -> Iterator[tuple[str, float]]:
    """Yield a point for each name with a value; for ``most`` of more names, and their range."""
    many = len(names) > most
    for name in evenly(names, most) if many else names:
        value = values.get(name)
        if value is not None and not math.isnan(value):
            yield f"{statistic}/{tag_of[name]}", value
    if many:
        finite = [value for value in values.values() if math.isfinite(value)]
        if finite:
            yield f"{statistic}/min", min(finite)
            yield f"{statistic}/median", float(np.median(finite))
            yield f"{statistic}/max", max(finite)


def _histograms(record: StepRecord) -> Mapping[str, Tagged]:
    """Return names and rows of the histograms, by the first part of their tags.

    Tensors without a finite value are omitted: TensorBoard would draw them as zeros.
    """
    layout = record.layout
    parameters = layout.numbered_parameters
    outputs, grads = record.outputs, record.output_grads
    return {
        "activation": _filled(outputs, {o: _output_tag(layout, o) for o in outputs}),
        "activation_grad": _filled(grads, {o: _output_tag(layout, o) for o in grads}),
        "grad": _filled(record.grads, parameters),
        "weight": _filled(record.weights, parameters),
    }


def _filled(records: Mapping[Any, TensorRecord], tag_of: Mapping[Any, str]) -> Tagged:
    tensors = Tensors.of(records)
    # Units may be many, and no histogram shows them.
    rows = tensors.rows.without_units()
    row_of = {name: row for row, name in enumerate(tensors) if rows.bucket_count[row]}
    found = {tag: row_of[name] for name, tag in tag_of.items() if name in row_of}
    return list(found), rows.take(np.array([*found.values()], np.intp))


def _joined(groups: Mapping[str, Tagged], prefix: str) -> Tagged:
    tags = [f"{prefix}{group}/{name}" for group, (names, _) in groups.items() for name in names]
    return tags, Rows.concatenate([rows for _, rows in groups.values()])


def _images(record: StepRecord) -> Iterator[tuple[str, NDArray[np.uint8]]]:
    for name, pixels in record.feature_maps.items():
        yield f"feature_maps/{_output_tag(record.layout, Output(name))}", pixels
    for name, pixels in record.filters.items():
        yield f"filters/{_output_tag(record.layout, Output(name))}", pixels
    if record.input is not None:
        yield "input", record.input


def _output_tag(layout: Layout, output: Output) -> str:
    """Return ``NNNN.name`` of a module's output; the root has the name of its class."""
    return str(output._replace(module_name=layout.numbered_modules[output.module_name]))

"""Turns a step's record into tags of TensorBoard's own dashboards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.images import encode_png
from telemetry.layers import PARAMETER_STATISTICS, table
from telemetry.plain_text import printable
from telemetry.records import Layout, Output, Parameter, StepRecord, TensorRecord
from telemetry.selection import spread
from telemetry.tag_names import TOTAL_GRAD_NORM, numbered
from telemetry.writing.magnitudes import log10_histogram

MANY_PARAMETERS = 64
"""Models with more have curves of some layers only: TensorBoard shows one card for each curve."""
SHOWN_OF_MANY = 12


def values_of(record: StepRecord) -> Iterator[Summary.Value]:
    """The values of one step; if it was not measured in full, only the total gradient norm.

    Tags are ``statistic/NNNN.name`` (:func:`~telemetry.tag_names.numbered`). Those of a phase begin
    with the phase's name.
    """
    if record.phase:
        for value in (*_layer_curves(record), *_histograms(record), *_images(record)):
            value.tag = f"{record.phase}/{value.tag}"
            yield value
        return
    yield summaries.scalar(TOTAL_GRAD_NORM, record.total_grad_norm)
    if not record.full:
        return
    if record.loss_scale is not None:
        yield summaries.scalar("scaler/scale", record.loss_scale)
        yield summaries.scalar("scaler/skipped_steps", record.skipped_steps)
    if record.total_grad_norm_before_clipping is not None:
        before = record.total_grad_norm_before_clipping
        yield summaries.scalar("grad_norm/total_before_clipping", before)
    if record.clipped_fraction is not None:
        yield summaries.scalar("grad_norm/clipped_fraction", record.clipped_fraction)
    yield from _parameter_curves(record)
    yield from _layer_curves(record)
    yield from _histograms(record)
    yield from _images(record)


def alert_value(alert: Alert, number: int) -> Summary.Value:
    """An alert as a text. Each has its own tag, because TensorBoard drops texts that share one."""
    where = f".{printable(alert.module_name)}" if alert.module_name else ""
    tag = f"alert/{number:04d}.{alert.kind}{where}"
    message = alert.message.replace("\n", "  \n")  # Markdown's line break
    return summaries.text(tag, f"**{alert.severity}** at step {alert.step}\n\n{message}")


def _parameter_curves(record: StepRecord) -> Iterator[Summary.Value]:
    layout = record.layout
    parameters = [layout.parameters[index] for index in layout.depth_order]
    tag_of = {p.name: _parameter_tag(layout, p) for p in parameters}
    for statistic, values_by_name in PARAMETER_STATISTICS.items():
        yield from _curves(statistic, list(tag_of), tag_of, values_by_name(record))


def _layer_curves(record: StepRecord) -> Iterator[Summary.Value]:
    layers = table(record)
    tag_of = {m.name: _output_tag(record.layout, Output(m.name)) for m in record.layout.modules}
    for statistic in layers.statistics:
        if not statistic.as_curve:
            continue
        found = {name: layers.value(row, statistic.name) for row, name in enumerate(tag_of)}
        values = {
            name: value
            for name, value in found.items()
            if value is not None and not (statistic.zero_is_silent and value == 0)
        }
        yield from _curves(statistic.name, list(values), tag_of, values)


def _curves(
    statistic: str, names: Sequence[str], tag_of: Mapping[str, str], values: Mapping[str, float]
) -> Iterator[Summary.Value]:
    """A point for each name with a value; of many names, for some, with the range over all."""
    many = len(names) > MANY_PARAMETERS
    for name in spread(names, SHOWN_OF_MANY) if many else names:
        value = values.get(name)
        if value is not None and not np.isnan(value):
            yield summaries.scalar(f"{statistic}/{tag_of[name]}", value)
    if many:
        finite = np.array([value for value in values.values() if np.isfinite(value)])
        if finite.size:
            yield summaries.scalar(f"{statistic}/min", float(finite.min()))
            yield summaries.scalar(f"{statistic}/median", float(np.median(finite)))
            yield summaries.scalar(f"{statistic}/max", float(finite.max()))


def _histograms(record: StepRecord) -> Iterator[Summary.Value]:
    layout = record.layout
    for output, tensor in record.outputs.items():
        yield _histogram(f"activation/{_output_tag(layout, output)}", tensor)
    for output, tensor in record.output_grads.items():
        yield _histogram(f"activation_grad/{_output_tag(layout, output)}", tensor)
        yield from _magnitudes(f"activation_grad_log10/{_output_tag(layout, output)}", tensor)
    for parameter in layout.parameters:
        tag = _parameter_tag(layout, parameter)
        if parameter.name in record.grads:
            yield _histogram(f"grad/{tag}", record.grads[parameter.name])
            yield from _magnitudes(f"grad_log10/{tag}", record.grads[parameter.name])
        if parameter.name in record.weights:
            yield _histogram(f"weight/{tag}", record.weights[parameter.name])


def _histogram(tag: str, tensor: TensorRecord) -> Summary.Value:
    return summaries.histogram(tag, *tensor.sketch.histogram())


def _magnitudes(tag: str, tensor: TensorRecord) -> Iterator[Summary.Value]:
    left, right, counts = log10_histogram(tensor.sketch)
    if counts.size:
        yield summaries.histogram(tag, left, right, counts)


def _images(record: StepRecord) -> Iterator[Summary.Value]:
    for name, pixels in record.feature_maps.items():
        yield image(f"feature_maps/{_output_tag(record.layout, Output(name))}", pixels)
    for name, pixels in record.filters.items():
        yield image(f"filters/{_output_tag(record.layout, Output(name))}", pixels)
    if record.input is not None:
        yield image("input", record.input)


def image(tag: str, pixels: NDArray[np.uint8]) -> Summary.Value:
    """A picture of ``[height, width, 3]`` pixels."""
    height, width, _ = pixels.shape
    return summaries.image(tag, [encode_png(pixels)], width, height)


def _parameter_tag(layout: Layout, parameter: Parameter) -> str:
    return numbered(layout.position[parameter.module_name], parameter.name)


def _output_tag(layout: Layout, output: Output) -> str:
    """``NNNN.name`` of a module's output; the model itself has the name of its class."""
    place = layout.position[output.module_name]
    name = output.module_name or layout.modules[place].type_name
    return numbered(place, str(Output(name, output.place)))

"""Values of a step's record for TensorBoard's own dashboards, and their tags."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events import summaries
from telemetry.layers import PARAMETER_STATISTICS, STATISTICS, table
from telemetry.layers.table import PLACES
from telemetry.measure.images import encode_png
from telemetry.plain_text import printable
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors
from telemetry.selection import evenly
from telemetry.tag_names import ALERTS, KIND, RUN, TOTAL_GRAD_NORM
from telemetry.writing.histograms import Tagged, histogram_values, log10_histogram_values

# Models with more parameters or modules have curves of some layers only, because TensorBoard shows
# one card for each curve.
MANY = 64
SHOWN_OF_MANY = 12

PIXELS_PER_STEP = 1 << 17

Picture: TypeAlias = tuple[str, NDArray[np.uint8]]
"""Tag, and pixels ``[height, width, 3]``."""

Points: TypeAlias = list[tuple[str, float]]
"""Tags of curves and their values."""

_CURVES = [statistic for statistic in STATISTICS if statistic.as_curve]
_COLUMNS = [PLACES[statistic.name] for statistic in _CURVES]
_ZERO_IS_SILENT = np.array([statistic.zero_is_silent for statistic in _CURVES])


class Pictures:
    """Pictures of a full step: as many as have 131,072 pixels together.

    The next full step goes on with the others. A picture that is larger alone is drawn at half its
    size, or less.
    """

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()  # by phase

    def values_of(self, pictures: Sequence[Picture], phase: str = "") -> Iterator[bytes]:
        """Yield the pictures of one step, or of a phase."""
        left = PIXELS_PER_STEP
        for _ in pictures:
            tag, pixels = pictures[self._next[phase] % len(pictures)]
            while pixels[..., 0].size > PIXELS_PER_STEP:
                pixels = pixels[::2, ::2]
            left -= pixels[..., 0].size
            if left < 0:
                return
            self._next[phase] = (self._next[phase] + 1) % len(pictures)
            height, width, _ = pixels.shape
            yield summaries.image(tag, [encode_png(pixels)], width, height)


def values_of(record: StepRecord, pictures: Pictures | None = None) -> Iterator[Sequence[bytes]]:
    """Yield the values of one step, some at a time; of other than full steps, the total norm.

    Tags are ``group/statistic/NNNN.name``, see :func:`~telemetry.tag_names.numbered`. In a phase,
    its name precedes the statistic.
    """
    prefix = f"{record.phase}/" if record.phase else ""
    points = [] if prefix else list(_curves_of_run(record))
    if not (prefix or record.full):
        yield [summaries.scalars(points)]
        return
    points += _curves_of_layers(record, f"{KIND}{prefix}")
    yield [summaries.scalars(points)]
    drawn = [(f"{KIND}{prefix}{tag}", pixels) for tag, pixels in _images(record)]
    yield [*(pictures or Pictures()).values_of(drawn, record.phase)]
    of_values, of_magnitudes = _histograms(record, f"{KIND}{prefix}")
    yield from histogram_values(*of_values)
    yield from log10_histogram_values(*of_magnitudes)


def alert_value(alert: Alert, number: int) -> bytes:
    """An alert as a text. Each has its own tag, because TensorBoard drops texts that share one."""
    where = f".{printable(alert.module_name)}" if alert.module_name else ""
    tag = f"{ALERTS}{number:04d}.{printable(alert.kind)}{where}"
    message = "  \n".join(map(printable, alert.message.split("\n")))  # Markdown's line break
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


def _curves_of_layers(record: StepRecord, group: str) -> Points:
    layout, points = record.layout, Points()
    most = SHOWN_OF_MANY if max(len(layout.parameters), len(layout.modules)) > MANY else MANY
    if not record.phase:
        names = [layout.parameters[index].name for index in layout.depth_order.tolist()]
        tags = [layout.numbered_parameters[name] for name in names]
        for name, values_by_name in PARAMETER_STATISTICS.items():
            found = values_by_name(record)
            values = [found.get(parameter, math.nan) for parameter in names]
            points += _curves(f"{group}{name}", tags, values, most)
    layers, tags = table(record), [*layout.numbered_modules.values()]
    columns, known = layers.values[:, _COLUMNS], layers.known[:, _COLUMNS]
    known &= ~(_ZERO_IS_SILENT & (columns == 0))
    of_each = zip(_CURVES, columns.T.tolist(), known.T.tolist(), strict=True)
    parts = slice(layout.input_count), slice(layout.input_count, None)
    for statistic, values, is_known in of_each:
        for part in parts:
            some = (
                [*compress(tags[part], is_known[part])],
                [*compress(values[part], is_known[part])],
            )
            points += _curves(f"{group}{statistic.name}", *some, most)
    return points


def _curves(statistic: str, tags: Sequence[str], values: Sequence[float], most: int) -> Points:
    """Return a point for each value; for ``most`` of more values, and their range.

    NaN, which also marks missing values, has no point.
    """
    pairs = list(zip(tags, values, strict=True))
    shown = evenly(pairs, most) if len(pairs) > most else pairs
    points = [(f"{statistic}/{tag}", value) for tag, value in shown if not math.isnan(value)]
    if len(pairs) > most and (finite := [*filter(math.isfinite, values)]):
        points.append((f"{statistic}/min", min(finite)))
        points.append((f"{statistic}/median", float(np.median(finite))))
        points.append((f"{statistic}/max", max(finite)))
    return points


def _histograms(record: StepRecord, prefix: str) -> tuple[Tagged, Tagged]:
    """Return tags and rows of all histograms, and of those of gradients' magnitudes.

    Tensors without a finite value are omitted: TensorBoard would draw them as zeros.
    """
    parameters = record.layout.numbered_parameters
    outputs = _output_tags(record.layout, record.outputs)
    output_grads = _output_tags(record.layout, record.output_grads)
    kinds: dict[str, tuple[Tensors[Any], Mapping[Any, str]]] = {
        "activation": (Tensors.of(record.outputs), outputs),
        "activation_grad": (Tensors.of(record.output_grads), output_grads),
        "grad": (Tensors.of(record.grads), parameters),
        "weight": (Tensors.of(record.weights), parameters),
    }
    # No histogram shows units.
    rows = Rows.concatenate([tensors.rows.without_units() for tensors, _ in kinds.values()])
    is_filled, first = (rows.bucket_count > 0).tolist(), 0
    found, magnitudes = dict[str, int](), dict[str, int]()
    for kind, (tensors, tag_of) in kinds.items():
        row_of = {name: row for row, name in enumerate(tensors, first) if is_filled[row]}
        first += len(tensors)
        some = {tag: row_of[name] for name, tag in tag_of.items() if name in row_of}
        found |= {f"{prefix}{kind}/{tag}": row for tag, row in some.items()}
        if kind.endswith("grad"):
            magnitudes |= {f"{prefix}{kind}_log10/{tag}": row for tag, row in some.items()}
    of_each = [np.array([*rows_of.values()], np.intp) for rows_of in (found, magnitudes)]
    return ([*found], rows.take(of_each[0])), ([*magnitudes], rows.take(of_each[1]))


def _images(record: StepRecord) -> Iterator[Picture]:
    tag_of = record.layout.numbered_modules
    for name, pixels in record.feature_maps.items():
        yield f"feature_maps/{tag_of[name]}", pixels
    for name, pixels in record.filters.items():
        yield f"filters/{tag_of[name]}", pixels
    if record.input is not None:
        yield "input", record.input


def _output_tags(layout: Layout, outputs: Iterable[Output]) -> dict[Output, str]:
    """Return ``NNNN.name`` of modules' outputs; the root has the name of its class."""
    tag_of = layout.numbered_modules
    return {
        output: f"{tag_of[output.module_name]}[{output.place}]"
        if output.place
        else tag_of[output.module_name]
        for output in outputs
    }

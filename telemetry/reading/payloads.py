"""Answers of the server to the page: JSON, and arrays preceded by a JSON header."""

from __future__ import annotations

import io
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from telemetry.layers import PAGE_STATISTICS
from telemetry.layers.pictures import MAX_CHANNELS, columns_in
from telemetry.layers.units import ranges
from telemetry.plain_text import json_plain
from telemetry.reading import builtin_tags
from telemetry.reading.distributions import distribution, histogram_table
from telemetry.reading.matrix import Matrix, Numbers, UnitExtremes
from telemetry.reading.run_data import Layer, RunData, trained_share
from telemetry.reading.sources import RunSource
from telemetry.tag_names import plain

# Four times a picture of 64 maps of 128 × 128 pixels, the largest that telemetry draws.
MAX_PICTURE_PIXELS = 1 << 22
# Larger than the PNG of any picture with that many pixels.
MAX_PICTURE_BYTES = 4 * MAX_PICTURE_PIXELS
# First onsets of one answer; the page shows a few.
MAX_ONSETS = 100

_ALIGNMENT = 8
_OF_STATISTIC = (
    "name", "title", "unit", "log", "description", "usual", "too_little", "too_much",
)  # fmt: skip

_Item: TypeAlias = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Header and arrays."""


def overview(run: RunData) -> dict[str, Any]:
    """Return layers, statistics, alerts and hyperparameters of a run."""
    states = run.training_states()
    pictured = builtin_tags.places_of_images(run.source.tags("images"))
    return {
        "version": run.version,
        "layers": [
            {
                "name": layer.name,
                "type": layer.type_name,
                "role": _role(layer),
                "code": layer.code,
                "hasPictures": not pictured.isdisjoint(layer.places),
                "state": state,
                "parameters": [{"name": p.name, "shape": p.shape} for p in layer.parameters],
            }
            for layer, state in zip(run.layers, states, strict=True)
        ],
        "trainedShare": trained_share(run.layers, states),
        "statistics": [
            {key: getattr(statistic, key) for key in _OF_STATISTIC}
            for statistic in PAGE_STATISTICS
            if statistic.measured_in is None or statistic.name in run.statistics
        ],
        "lastStep": run.last_step or 0,
        "alerts": [{**json_plain(alert), "message": alert.message} for alert in run.alerts],
        "hparams": run.hyperparameters(),
        "resumed": run.resumed,
        "estimated": run.estimated(),
    }


def _role(layer: Layer) -> str:
    """Return the part of a module's path after its last index; its class without one.

    ``blocks.3.attn.qkv`` has the role ``attn.qkv``, ``blocks.3.mlp.0`` the role ``mlp``.
    """
    path = layer.name.split(".")
    while path and path[-1].isdecimal():
        path.pop()
    indices = [place for place, part in enumerate(path) if part.isdecimal()]
    return ".".join(path[indices[-1] + 1 :]) if indices else layer.type_name


def onsets(run: RunData, step: int) -> dict[str, Any]:
    """Return the layers that left their baseline first; null without a baseline."""
    found = run.onsets_by(step)
    # JSON has no infinity.
    shown = [
        asdict(onset) | ({} if math.isfinite(onset.factor) else {"factor": "Infinity"})
        for onset in (found or ())[:MAX_ONSETS]
    ]
    layers = sum(bool(layer.parameters) for layer in run.layers)
    return {"onsets": None if found is None else shown, "count": len(found or ()), "layers": layers}


def matrix(part: Matrix) -> bytes:
    """Pack steps ``[columns]`` and values ``[columns, rows]``."""
    header = {
        "rows": part.values.shape[1],
        "firstLayer": part.first_layer,
        "layerFactor": part.layer_factor,
        "stepFactor": part.step_factor,
    }
    return pack(header, {"steps": part.steps, "values": part.values})


def units(found: UnitExtremes) -> bytes:
    """Pack steps ``[steps]`` and the extremes of each unit, ``[steps, units, 2]``.

    Both extremes of a dead unit are 0; of an omitted unit, the minimum is above the maximum. In a
    reduced answer, a step represents all steps up to the next one. The header has the ``count`` of
    units; for each step those that are ``dead``, ``belowZero`` and ``saturated``, as ``0-11, 40``,
    and the number of omitted units, ``omitted``; ``sampled``: whether steps are omitted.
    """
    header = {
        "count": found.extremes.shape[1],
        "dead": [*map(ranges, found.dead)],
        "belowZero": [*map(ranges, found.below_zero)],
        "saturated": [*map(ranges, found.saturated)],
        "omitted": found.omitted.sum(axis=1).tolist(),
        "sampled": found.sampled,
    }
    return pack(header, {"steps": found.steps, "extremes": found.extremes})


def scalars(run: RunData) -> bytes:
    """Pack loss, learning rates, parts of a step's time, and memory, if the run has them."""
    curves, costs = builtin_tags.scalar_curves(run), run.costs()
    found = {**costs, **run.source.read("scalars", [tag for _, tag in curves])}
    curves += builtin_tags.cost_curves(costs)
    loss, logged = run.loss_tag(), run.logged()
    if loss in logged:  # TensorBoard may not have loaded all of it yet
        curves = [("loss", loss), *(curve for curve in curves if curve[0] != "loss")]
        found[loss] = logged[loss]
    items: list[_Item] = []
    for kind, tag in curves:
        if series := found.get(tag):
            steps, values = zip(*series, strict=True)
            if kind == "learning rate" and steps[-1] < (run.last_step or 0):
                # It is written where it changes.
                steps, values = (*steps, run.last_step), (*values, values[-1])
            arrays = {"steps": np.array(steps, np.int64), "values": np.array(values, np.float32)}
            items.append(({"kind": kind, "tag": plain(tag)}, arrays))
    return _pack_items("curves", items)


def layer_series(statistics: Mapping[str, Numbers], parameters: Mapping[str, Numbers]) -> bytes:
    """Pack all statistics of one layer, and the gradient norm of each of its parameters."""
    groups = {"statistics": statistics, "parameters": parameters}
    arrays: dict[str, NDArray[Any]] = {}
    for group, curves in groups.items():
        for number, (steps, values) in enumerate(curves.values()):
            arrays[f"{group}{number}.steps"] = steps
            arrays[f"{group}{number}.values"] = values
    return pack({group: list(curves) for group, curves in groups.items()}, arrays)


def histograms(source: RunSource, layer: Layer) -> bytes:
    """Pack the layer's histograms over time, from the tags of the Histograms dashboard."""
    tags = builtin_tags.histogram_tags(layer, source.tags("histograms"))
    points = source.read("histograms", [tag for _, _, tag in tags])
    items: list[_Item] = []
    for kind, name, tag in tags:
        tables = []
        for step, value in points.get(tag, ()):
            try:
                tables.append((step, histogram_table(value)))
            except ValueError as error:
                source.problems.add(tag, error)
        if (found := distribution(tables)) is not None:
            head = {"kind": kind, "name": name, "unit": found.unit, "zeroBin": found.zero_bin}
            arrays: dict[str, NDArray[Any]] = {
                "steps": found.steps,
                "edges": found.edges,
                "shares": found.shares,
            }
            items.append((head, arrays))
    return _pack_items("histograms", items)


def _pack_items(name: str, items: Sequence[_Item]) -> bytes:
    """Pack the header of each item as a list, and its arrays with the item's number."""
    arrays = {f"{key}{i}": array for i, (_, of) in enumerate(items) for key, array in of.items()}
    return pack({name: [header for header, _ in items]}, arrays)


def images(source: RunSource, layer: Layer) -> list[dict[str, Any]]:
    """Return the layer's pictures and their steps, from the tags of the Images dashboard.

    ``maps`` has the ``count`` of the maps in a picture and their ``columns``; null without a grid.
    """
    tags = builtin_tags.image_tags(layer, source.tags("images"))
    read = source.read("images", [tag for _, _, tag in tags])
    steps = {tag: [step for step, _ in read.get(tag, ())] for _, _, tag in tags}
    return [
        {"kind": kind, "name": name, "tag": tag, "steps": steps[tag]}
        | {"maps": _maps(source, layer, kind, tag, steps[tag])}
        for kind, name, tag in tags
    ]


def _maps(
    source: RunSource, layer: Layer, kind: str, tag: str, steps: Sequence[int]
) -> dict[str, int] | None:
    shapes = [parameter.shape for parameter in layer.parameters]
    weight = next((shape for shape in shapes if len(shape) > 2), None)
    if weight is None or kind == "input" or not steps:
        return None
    bias = next((shape for shape in shapes if len(shape) == 1), None)
    count = weight[0]
    if kind != "filters":
        count = bias[0] if bias else weight[1 if "Transpose" in layer.type_name else 0]
    png = picture(source, tag, steps[-1])
    if png is None or count < 2:
        return None
    try:
        with Image.open(io.BytesIO(png)) as image:
            gray = np.asarray(image.convert("L"))
    except (OSError, ValueError, SyntaxError) as error:  # as Pillow says that a file is broken
        source.problems.add(tag, error)
        return None
    columns = columns_in(shown := min(count, MAX_CHANNELS), gray)
    return None if columns is None else {"count": shown, "columns": columns}


def picture(source: RunSource, tag: str, step: int) -> bytes | None:
    """Return a PNG file; None if the picture is missing, too large or not a PNG."""
    try:
        png = source.picture(tag, step)
        return None if png is None else _checked_png(png)
    except ValueError as error:
        source.problems.add(tag, error)
        return None


def _checked_png(png: bytes) -> bytes:
    if len(png) > MAX_PICTURE_BYTES:
        raise ValueError(f"its picture has {len(png)} bytes")
    # Signature; then length, name and the first two fields of the first chunk.
    if len(png) < 24 or (png[:8], png[12:16]) != (b"\x89PNG\r\n\x1a\n", b"IHDR"):
        raise ValueError("its picture is not a PNG")
    width, height = struct.unpack_from(">II", png, 16)
    if width * height > MAX_PICTURE_PIXELS:
        raise ValueError(f"its picture has {width} × {height} pixels")
    return png


def pack(header: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Pack the header's length as 8 little-endian bytes, the header, then the arrays.

    Header and arrays begin at multiples of 8 bytes. The header's ``arrays`` gives the ``type``
    (``f4``, or ``f8`` also for int64, little-endian), ``shape`` and ``offset`` from the header's
    end of each array.
    """
    descriptions, blobs, offset = {}, [], 0
    for name, array in arrays.items():
        kind = "f4" if array.dtype == np.float32 else "f8"
        data = array.astype(f"<{kind}", copy=False).tobytes()
        data += bytes(-len(data) % _ALIGNMENT)
        descriptions[name] = {"type": kind, "shape": array.shape, "offset": offset}
        blobs.append(data)
        offset += len(data)
    text = json.dumps({**header, "arrays": descriptions}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(_ALIGNMENT, "little"), text, *blobs])

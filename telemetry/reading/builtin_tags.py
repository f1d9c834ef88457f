"""Find the tags of a layer in TensorBoard's own dashboards.

Without groups, they are ``kind/NNNN.name``, where NNNN is the layer's position in the forward order
at that time, and ``kind/NNNN.name[i]`` for further outputs.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from telemetry.plain_text import printable
from telemetry.reading.run_data import Layer, RunData
from telemetry.records.loss import loss_among
from telemetry.records.step import INPUT
from telemetry.tag_names import ALLOCATED_BYTES, HOST_BYTES, TIMES, parse_numbered, plain

_OUTPUT_KINDS = {"activation": "outputs", "activation_grad": "gradients of outputs"}
_PARAMETER_KINDS = {"weight": "parameters", "grad": "gradients"}
_PICTURE = re.compile(r"(?:(.+)/)?(feature_maps|filters|input)(?:/(\d{4,9})\.(.*))?", re.DOTALL)
_OTHER = "", -1, ""
_RATE = re.compile(r"learning_rate/\d+|lr", re.IGNORECASE)
MAX_RATES = 4
_MAX_METRICS = 30

NamedTag = tuple[str, str, str]
"""The kind of data, the name of the output or parameter, and the tag."""


def histogram_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Return the tags of a layer's outputs and parameters, and of their gradients."""
    outputs, parameters = [], []
    parameter_names = {printable(parameter.name) for parameter in layer.parameters}
    for tag in tags:
        kind, place, name = parse_numbered(tag) or _OTHER
        if kind in _OUTPUT_KINDS and _is_output(layer, place, name):
            outputs.append((_OUTPUT_KINDS[kind], name, tag))
        elif kind in _PARAMETER_KINDS and name in parameter_names:
            parameters.append((_PARAMETER_KINDS[kind], name, tag))
    return sorted(outputs, reverse=True) + sorted(parameters, key=lambda item: (item[1], item[0]))


def image_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Return the tags of a layer's feature maps and filters, if any, and of the model's input."""
    own, inputs = [], []
    for tag in tags:
        if (found := _PICTURE.fullmatch(plain(tag))) is None:
            continue
        phase, kind, place, name = found.groups()
        kind = kind.replace("_", " ") + (f" of {phase}" if phase else "")
        if place is None:
            inputs.append((kind, "the model", tag))
        elif _is_output(layer, int(place), name):
            own.append((kind, name, tag))
    return sorted(own + inputs) if own or layer.name == INPUT else []


def places_of_images(tags: Iterable[str]) -> set[int]:
    """Return the places in forward order of layers with pictures."""
    found = [_PICTURE.fullmatch(plain(tag)) for tag in tags]
    return {int(picture[3]) for picture in found if picture and picture[3]}


def metrics_among(tags: Iterable[str], loss: str | None) -> list[str]:
    """Return the scalars that the user logged: no tag of ours, no learning rate, not the loss."""
    own = [tag for tag in tags if tag == plain(tag) and parse_numbered(tag) is None]
    return sorted(tag for tag in own if tag != loss and not _RATE.fullmatch(tag))[:_MAX_METRICS]


def scalar_curves(run: RunData) -> list[tuple[str, str]]:
    """Return pairs of ``loss`` or ``learning rate`` and a tag: one loss, some learning rates."""
    known = sorted(run.source.tags("scalars"))
    loss = run.loss_tag()  # as the logger wrote it
    loss = loss if loss in known else loss_among(known)
    rates = [tag for tag in known if _RATE.fullmatch(plain(tag))][:MAX_RATES]
    return [*(("loss", tag) for tag in (loss,) if tag), *(("learning rate", tag) for tag in rates)]


def cost_curves(tags: Collection[str]) -> list[tuple[str, str]]:
    """Return pairs of ``time`` or ``memory`` and one of the tags: all parts of a step, or none."""
    times = [("time", tag) for tag in TIMES if tag in tags]
    memory = [("memory", tag) for tag in (ALLOCATED_BYTES, HOST_BYTES) if tag in tags]
    return [*times, *memory] if len(times) == len(TIMES) else []


def _is_output(layer: Layer, place: int, name: str) -> bool:
    shown = printable(layer.name or layer.type_name)
    is_called = re.fullmatch(rf"{re.escape(shown)}(\[\d+\])?", name) is not None
    return place in layer.places and is_called

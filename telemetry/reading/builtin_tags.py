"""Which tags of TensorBoard's own dashboards belong to a layer.

They read ``kind/NNNN.name``, with the layer's place in the forward order, which may change while a
run goes on, and ``kind/NNNN.name[i]`` for further outputs: another layer may be called that, but it
has another place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from telemetry.plain_text import printable
from telemetry.reading.sessions import Layer

_OUTPUT_KINDS = {"activation": "outputs", "activation_grad": "gradients of outputs"}
_PARAMETER_KINDS = {"weight": "parameters", "grad": "gradients"}
_IMAGE_KINDS = {"feature_maps": "feature maps", "filters": "filters"}
_TAG = re.compile(r"(\w+)/(\d{4,9})\.(.*)", re.DOTALL)
_LOSS = re.compile(r"(.*[/_.])?loss", re.IGNORECASE)
_RATE = re.compile(r"learning_rate/\d+|lr", re.IGNORECASE)
_MAX_RATES = 4

NamedTag = tuple[str, str, str]
"""What it shows, of which output or parameter, the tag."""


def histogram_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Those of a layer's outputs, parameters and their gradients."""
    outputs, parameters = [], []
    parameter_names = {printable(parameter.name) for parameter in layer.parameters}
    for tag in tags:
        kind, place, name = _split(tag)
        if kind in _OUTPUT_KINDS and place in layer.places and _is_output(layer, name):
            outputs.append((_OUTPUT_KINDS[kind], name, tag))
        elif kind in _PARAMETER_KINDS and name in parameter_names:
            parameters.append((_PARAMETER_KINDS[kind], name, tag))
    return sorted(outputs, reverse=True) + sorted(parameters, key=lambda item: (item[1], item[0]))


def image_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Those of a layer's feature maps and filters."""
    found = []
    for tag in tags:
        kind, place, name = _split(tag)
        if kind in _IMAGE_KINDS and place in layer.places and _is_output(layer, name):
            found.append((_IMAGE_KINDS[kind], name, tag))
    return sorted(found)


def scalar_curves(tags: Iterable[str]) -> list[tuple[str, str]]:
    """Pairs of ``loss`` or ``learning rate`` and a tag: one loss, some learning rates."""
    known = sorted(tags)
    losses = sorted((tag for tag in known if _LOSS.fullmatch(tag)), key=lambda tag: (len(tag), tag))
    rates = [tag for tag in known if _RATE.fullmatch(tag)]
    return [("loss", tag) for tag in losses[:1]] + [
        ("learning rate", tag) for tag in rates[:_MAX_RATES]
    ]


def _split(tag: str) -> tuple[str, int, str]:
    """Kind, place and name; older versions wrote names as they are."""
    found = _TAG.fullmatch(tag)
    return (found[1], int(found[2]), printable(found[3])) if found else ("", -1, "")


def _is_output(layer: Layer, name: str) -> bool:
    shown = printable(layer.name or layer.type_name)
    return re.fullmatch(rf"{re.escape(shown)}(\[\d+\])?", name) is not None

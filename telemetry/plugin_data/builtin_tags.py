"""Which tags of TensorBoard's own dashboards belong to a layer.

They read ``kind/NNNN.name``, with the layer's place in the forward order, which may change while a
run goes on; so it is the name that is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from telemetry.plugin_data.sessions import Layer

_OUTPUT_KINDS = {"activation": "outputs", "activation_grad": "gradients of outputs"}
_PARAMETER_KINDS = {"weight": "parameters", "grad": "gradients"}
_IMAGE_KINDS = {"feature_maps": "feature maps", "filters": "filters"}
_LOSS = re.compile(r"(.*[/_.])?loss", re.IGNORECASE)
_RATE = re.compile(r"learning_rate/\d+|lr", re.IGNORECASE)
_MAX_RATES = 4

NamedTag = tuple[str, str, str]
"""What it shows, of which output or parameter, the tag."""


def histogram_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Those of a layer's outputs, parameters and their gradients."""
    outputs, parameters = [], []
    for tag in tags:
        kind, name = _split(tag)
        if kind in _OUTPUT_KINDS and _is_output(layer, name):
            outputs.append((_OUTPUT_KINDS[kind], name, tag))
        elif kind in _PARAMETER_KINDS and any(p.name == name for p in layer.parameters):
            parameters.append((_PARAMETER_KINDS[kind], name, tag))
    return sorted(outputs, reverse=True) + sorted(parameters, key=lambda item: (item[1], item[0]))


def image_tags(layer: Layer, tags: Iterable[str]) -> list[NamedTag]:
    """Those of a layer's feature maps and filters."""
    found = []
    for tag in tags:
        kind, name = _split(tag)
        if kind in _IMAGE_KINDS and _is_output(layer, name):
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


def _split(tag: str) -> tuple[str, str]:
    kind, _, numbered = tag.partition("/")
    return kind, numbered.partition(".")[2]


def _is_output(layer: Layer, name: str) -> bool:
    shown = layer.name or layer.type_name
    return name == shown or (name.startswith(f"{shown}[") and name.endswith("]"))

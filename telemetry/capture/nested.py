"""Tensors inside of the arguments and outputs of modules."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

_DEEPEST = 8  # containers inside of each other; one may contain itself


def tensors_in(value: object, depth: int = 0) -> list[Tensor]:
    """Return the tensors in nested tuples, lists, mappings and dataclasses, in their order.

    Other objects are skipped.
    """
    if isinstance(value, Tensor):
        return [value]
    items: Iterable[object] = ()
    if depth == _DEEPEST:
        return []
    if isinstance(value, Mapping):
        items = value.values()
    elif isinstance(value, tuple | list):
        items = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    tensors: list[Tensor] = []
    for item in items:
        tensors += [item] if isinstance(item, Tensor) else tensors_in(item, depth + 1)
    return tensors


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return ``value`` with ``function`` applied to every tensor of :func:`tensors_in`.

    Containers keep their types; a mapping that cannot be changed stays as it is.
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, MutableMapping):
        rebuilt = copy.copy(value)
        for key, item in value.items():
            rebuilt[key] = map_tensors(item, function)
        return rebuilt
    if isinstance(value, tuple | list):
        items = [map_tensors(item, function) for item in value]
        # Named tuples take one argument for each field; torch's own take a sequence.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            item = map_tensors(getattr(value, field.name, None), function)
            object.__setattr__(other, field.name, item)  # also on a frozen one
        return other
    return value

"""Tensors inside of what modules are given and return."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

from torch import Tensor

# Containers inside of each other; one that holds itself would have no end.
_DEEPEST = 8


def tensors_in(value: object, depth: int = 0) -> list[Tensor]:
    """Tensors in tuples, lists, mappings and dataclasses, nested in each other, in their order.

    Anything else (None, numbers, foreign objects) is passed over.
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
    found: list[Tensor] = []
    for item in items:
        found += tensors_in(item, depth + 1)
    return found


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """``value`` with every tensor of :func:`tensors_in` replaced by what ``function`` makes of it.

    Containers are rebuilt as what they were; a mapping that cannot be changed stays as it is.
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
        # Named tuples take one argument for each field; torch's own take a sequence, as others do.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        other = copy.copy(value)
        for field in dataclasses.fields(value):
            # Frozen ones are values, too.
            item = map_tensors(getattr(value, field.name, None), function)
            object.__setattr__(other, field.name, item)
        return other
    return value

"""The tensors inside whatever a module returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from torch import Tensor


def tensors_in(value: object) -> Iterator[Tensor]:
    """Tensors in tuples, lists, mappings and dataclasses, nested at will, in their order.

    Anything else (None, numbers, foreign objects) is passed over.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None))

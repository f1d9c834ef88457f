"""Conversion of rules' state to plain values and back, for runs that resume.

The state of an object is the fields of its dataclass without a detector's limits, which belong to
the new run; of other classes, the attributes that they annotate. They may be numbers, strings,
arrays, lists, tuples, sets, dicts, deques, and such objects. An object that exists is filled,
others are created. A dict becomes a list of pairs, because JSON keys are strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, ClassVar, Literal, cast, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray


def to_plain(value: object) -> Any:
    """Return the state of an object as numbers, strings, lists and dicts."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, dict):
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    if isinstance(value, list | tuple | deque):
        return [to_plain(item) for item in value]
    if isinstance(value, set):
        return sorted(map(to_plain, value))
    if value is None or isinstance(value, int | float | str):
        return value
    return {name: to_plain(getattr(value, name)) for name in _state_hints(type(value))}


def restore(target: object, plain: object) -> None:
    """Restore the state that :func:`to_plain` returned for an object; all or nothing.

    Raises:
        TypeError, ValueError, KeyError: The plain values do not fit the object.
    """
    vars(target).update(vars(_restored(type(target), plain, target)))


def _restored(hint: Any, plain: Any, current: Any = None) -> Any:
    """Return a value of the type ``hint`` to replace ``current``."""
    kind, arguments = _kind(hint), get_args(hint)
    if kind is Any or kind is Literal:
        return plain
    if kind is UnionType:  # with None
        return None if plain is None else _restored(arguments[0], plain)
    if kind in _SCALARS:
        if not isinstance(plain, _SCALARS[kind]):
            raise TypeError(f"{plain!r} is not a {hint}")
        return plain
    is_list = kind in (np.ndarray, list, set, dict, deque) or issubclass(kind, tuple)
    if not isinstance(plain, list | tuple if is_list else Mapping):
        raise TypeError(f"{plain!r} is not a {hint}")
    restored: Any = _from_list if is_list else _from_attributes
    return restored(hint, plain, current)


def _from_list(hint: Any, plain: Sequence[Any], current: Any) -> Any:
    kind, arguments = _kind(hint), get_args(hint) or (Any, Any)
    if kind is np.ndarray:
        return np.array(plain, _dtype(hint))
    if kind is dict:
        return {_restored(arguments[0], k): _restored(arguments[1], v) for k, v in plain}
    if hasattr(kind, "_fields"):  # a named tuple
        return kind(*map(_restored, get_type_hints(kind).values(), plain))
    if kind is tuple and get_args(hint) and arguments[-1] is not Ellipsis:
        return tuple([_restored(part, item) for part, item in zip(arguments, plain, strict=True)])
    items = [_restored(arguments[0], item) for item in plain]
    return deque(items, maxlen=current.maxlen) if kind is deque else kind(items)


def _from_attributes(hint: Any, plain: Mapping[str, Any], current: Any) -> Any:
    hints = _state_hints(hint)
    if current is None:
        fields = {name: _restored(hints[name], item) for name, item in plain.items()}
        return cast("Any", hint)(**fields)
    filled = copy(current)
    for name, kind in hints.items():
        setattr(filled, name, _restored(kind, plain[name], getattr(current, name)))
    return filled


def _kind(hint: Any) -> Any:
    """Return the class of a type; ``NDArray`` is an alias of its own since NumPy 2.5."""
    kind = get_origin(hint) or hint
    return np.ndarray if kind is NDArray else kind


def _dtype(hint: Any) -> Any:
    *_, last = get_args(hint)  # the dtype, or its class
    return (get_args(last) or (last,))[0]


def _state_hints(kind: Any) -> dict[str, Any]:
    """Return names and types of the state of a class."""
    hints = get_type_hints(kind)
    if is_dataclass(kind):
        return {each.name: hints[each.name] for each in fields(kind) if LIMIT not in each.metadata}
    return {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}


LIMIT = "limit"
"""Key of a field's metadata; its value is what the limit means."""

_SCALARS: Mapping[Any, Any] = {bool: bool, int: int, float: (int, float), str: str}

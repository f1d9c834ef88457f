"""Saved states of detectors are restored, if all their fields fit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from telemetry.alert import Alert, Consequence
from telemetry.alerts.state import restore, to_plain
from telemetry.records import CodeLocation


class Inner:
    _values: deque[float]

    def __init__(self) -> None:
        self._values = deque([1.0], maxlen=2)


@dataclass(frozen=True, kw_only=True)
class Item:
    mask: NDArray[np.bool_]
    share: float


class Key(NamedTuple):
    name: str
    index: int


class Outer:
    inner: Inner
    _items: dict[Key, Item]
    _range: tuple[float, int]
    _alert: Alert | None

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inner = Inner()
        self._items = {}
        self._range = (0.0, 0)
        self._alert = None


def test_values_are_restored_with_their_types() -> None:
    before, after = Outer(1.0), Outer(2.0)
    before.inner._values.extend([np.float32(2.0), 3.0])
    before._items[Key("a", 1)] = Item(mask=np.array([True, False]), share=np.float64(0.5))
    before._range = (-np.inf, 1)
    before._alert = Alert(
        kind="k", severity="error", step=3, module_name=None, value=1.0, threshold=0.0,
        summary="m", consequences=(Consequence(kind="x", module_name="a"),), advice=("A", "B"),
        location=CodeLocation(file="nets.py", line=7, class_name="Net"),
    )  # fmt: skip
    inner = after.inner
    restore(after, to_plain(before))
    assert after.limit == 2.0
    assert after.inner._values == deque([2.0, 3.0])
    assert after.inner._values.maxlen == 2
    [(key, item)] = after._items.items()
    assert isinstance(key, Key)
    assert (key.name, key.index, item.mask.dtype) == ("a", 1, np.bool_)
    assert item.mask.tolist() == [True, False]
    assert (after._range, after._alert) == (before._range, before._alert)
    assert inner._values == deque([1.0])  # replaced, not changed in place


class Bare:
    _row: tuple = (-1, 0)  # type: ignore[type-arg]
    _seen: set = frozenset()  # type: ignore[type-arg,assignment]
    _named: dict = {}  # type: ignore[type-arg]  # noqa: RUF012
    _latest: deque = deque(maxlen=2)  # type: ignore[type-arg]  # noqa: RUF012


def test_containers_without_an_item_type_are_restored_too() -> None:
    before, after = Bare(), Bare()
    before._row, before._seen, before._named = (3, 4), {"a"}, {"b": 1}
    before._latest = deque([1.0, 2.0], maxlen=2)
    restore(after, to_plain(before))
    assert (after._row, after._seen, after._named) == ((3, 4), {"a"}, {"b": 1})
    assert (after._latest, after._latest.maxlen) == (deque([1.0, 2.0]), 2)


@pytest.mark.parametrize(
    "damage",
    [
        {"_range": [1.0, "far"]},
        {"_range": [1.0, 0.5]},
        {"_range": [1.0]},
        {"_items": [[["a", 1], {"mask": [True]}]]},
        {"_items": [[["a", 1], {"mask": [True], "share": 0.5, "color": 1}]]},
        {"_items": [[["a"], {"mask": [True], "share": 0.5}]]},
        {"_items": [[["a", 1]]]},
        {"_items": {"a": 1}},
        {"_items": 3},
        {"_alert": {"kind": "k"}},
        {"_alert": {"severity": "fatal"}},
        {"inner": []},
        {"inner": {}},
        {"inner": {"_values": None}},
    ],
)
def test_an_incompatible_value_changes_nothing(damage: dict[str, Any]) -> None:
    target = Outer(1.0)
    before = repr(to_plain(target))
    with pytest.raises((TypeError, ValueError, KeyError)):
        restore(target, {**to_plain(Outer(1.0)), "inner": {"_values": [9.0]}, **damage})
    assert repr(to_plain(target)) == before

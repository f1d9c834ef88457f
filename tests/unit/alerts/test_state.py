"""Saved states of detectors are restored, if all their fields fit."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from telemetry import Detector, limit, state


@dataclass(frozen=True, kw_only=True)
class Item:
    mask: NDArray[np.bool_]
    share: float


class Key(NamedTuple):
    name: str
    index: int


class Inner:
    """An object that is filled, not created."""

    _latest: deque[float]

    def __init__(self) -> None:
        self._latest = deque(maxlen=2)


class Outer(Detector):
    kind = "outer"
    limit: float = limit(1.0, "Share.")
    inner: Inner = state(Inner)
    _items: dict[Key, Item] = state(dict)
    _range: tuple[float, int] = state((0.0, 0))
    _seen: set[str] = state(set)
    _three: deque[int] = state(partial(deque, maxlen=3))
    _bare: deque = state(deque)  # type: ignore[type-arg]
    _row: tuple = state((-1, 0))  # type: ignore[type-arg]


def state_of(detector: Detector) -> Any:
    return json.loads(json.dumps(detector.state_dict()))  # as in a checkpoint


def test_values_are_restored_with_their_types() -> None:
    before, after = Outer(limit=1.0), Outer(limit=2.0)
    before.inner._latest.extend([np.float32(2.0), 3.0])
    before._items[Key("a", 1)] = Item(mask=np.array([True, False]), share=np.float64(0.5))
    before._range, before._row, before._seen = (-np.inf, 1), (3, 4), {"b", "a"}
    before._three.extend([1, 2])
    before._bare.append("x")
    inner = after.inner
    after.load_state_dict(state_of(before))
    assert after.limit == 2.0
    assert (after.inner._latest, after.inner._latest.maxlen) == (deque([2.0, 3.0]), 2)
    [(key, item)] = after._items.items()
    assert isinstance(key, Key)
    assert (key.name, key.index, item.mask.dtype, item.share) == ("a", 1, np.bool_, 0.5)
    assert item.mask.tolist() == [True, False]
    assert (after._range, after._row, after._seen) == ((-np.inf, 1), (3, 4), {"a", "b"})
    assert (after._three, after._bare) == (deque([1, 2]), deque(["x"]))
    assert inner._latest == deque()  # replaced, not changed in place


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
        {"active_alert": {"kind": "k"}},
        {"active_alert": {"severity": "fatal"}},
        {"inner": []},
        {"inner": {}},
        {"inner": {"_latest": None}},
    ],
)
def test_an_incompatible_value_changes_nothing(damage: dict[str, Any]) -> None:
    target = Outer()
    before, saved = state_of(target), state_of(Outer())
    saved["detector"] |= {"inner": {"_latest": [9.0]}, **damage}
    with pytest.raises((TypeError, ValueError, KeyError)):
        target.load_state_dict(saved)
    assert state_of(target) == before

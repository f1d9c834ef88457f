"""What rules remember: all that changes in them, and only while it fits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import pytest
from interrupted_runs import RUNS, train
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.alerts import default_rules
from telemetry.alerts.causes import OneCause
from telemetry.alerts.memory import restore, to_plain
from telemetry.records import StepRecord


def forgotten(used: object, new: object, path: str) -> set[str]:
    """Attributes of a used object that differ from a new one's, and that are not remembered."""
    hints, found = get_type_hints(type(used)), set()
    for name, value in vars(used).items():
        before = getattr(new, name)
        if name in hints:
            if hasattr(value, "__dict__") and not is_dataclass(value):
                found |= forgotten(value, before, f"{path}.{name}")
        elif isinstance(value, np.ndarray):
            found |= set() if np.array_equal(value, before) else {f"{path}.{name}"}
        elif isinstance(value, int | float | str | bool | dict | list | tuple | deque):
            found |= set() if repr(value) == repr(before) else {f"{path}.{name}"}
    return found


@pytest.mark.parametrize("name", RUNS)
def test_rules_remember_all_that_a_run_changes(tmp_path: Path, name: str) -> None:
    [used], [new] = default_rules(), default_rules()
    assert isinstance(used, OneCause)
    assert isinstance(new, OneCause)
    pairs = [(part, old, new._parts()[part]) for part, old in used._parts().items()]
    found: set[str] = set()

    def look(record: StepRecord) -> Iterable[Alert]:
        for part, old, fresh in pairs:
            found.update(forgotten(old, fresh, part))
        return ()

    train(RUNS[name], tmp_path, rules=[used, look])
    # Rules have parts of their own; what was put in order is put in order again.
    known = {name for name in found if name.endswith(("._ordered", "._ordered_of"))}
    assert found - known <= {"causes._rules", "causes._of_losses"}
    new.load_state_dict(used.state_dict())
    assert repr(new.state_dict()) == repr(used.state_dict())


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
    place: int


class Outer:
    inner: Inner
    _items: dict[Key, Item]
    _range: tuple[float, float]
    _alert: Alert | None

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.inner = Inner()
        self._items = {}
        self._range = (0.0, 0.0)
        self._alert = None


def test_a_value_comes_back_as_what_it_was() -> None:
    before, after = Outer(1.0), Outer(2.0)
    before.inner._values.extend([np.float32(2.0), 3.0])
    before._items[Key("a", 1)] = Item(mask=np.array([True, False]), share=np.float64(0.5))
    before._range = (-np.inf, 1.0)
    before._alert = Alert(
        kind="k", severity="error", step=3, module_name=None, value=1.0, threshold=0.0,
        message="m", consequences=("x",),
    )  # fmt: skip
    inner = after.inner
    restore(after, to_plain(before))
    assert after.limit == 2.0
    assert after.inner._values == deque([2.0, 3.0])
    assert after.inner._values.maxlen == 2
    [(key, item)] = after._items.items()
    assert isinstance(key, Key)
    assert (key.name, key.place, item.mask.dtype) == ("a", 1, np.bool_)
    assert item.mask.tolist() == [True, False]
    assert (after._range, after._alert) == (before._range, before._alert)
    assert inner._values == deque([1.0])  # no half of it was set before all was known to fit


@pytest.mark.parametrize(
    "damage",
    [
        {"_range": [1.0, "far"]},
        {"_items": [[["a", 1], {"mask": [True]}]]},
        {"_items": [[["a", 1], {"mask": [True], "share": 0.5, "color": 1}]]},
        {"_items": [[["a"], {"mask": [True], "share": 0.5}]]},
        {"_items": [[["a", 1]]]},
        {"_items": {"a": 1}},
        {"_items": 3},
        {"_alert": {"kind": "k"}},
        {"_alert": {"severity": "fatal"}},
        {"inner": []},
        {"inner": {"_values": None}},
    ],
)
def test_what_does_not_fit_changes_nothing(damage: dict[str, Any]) -> None:
    target = Outer(1.0)
    before = repr(to_plain(target))
    with pytest.raises((TypeError, ValueError, KeyError)):
        restore(target, {**to_plain(Outer(1.0)), "inner": {"_values": [9.0]}, **damage})
    assert repr(to_plain(target)) == before


def test_state_of_another_release_is_told() -> None:
    [rule], [new] = default_rules(), default_rules()
    state = rule.state_dict()
    state["dead_units"]["once"] = state["course"]["norm"].pop("above")  # needed no longer
    del state["eval_mode"]
    with pytest.raises(ValueError, match="anew") as told:
        new.load_state_dict(state)
    assert set(str(told.value).split(", ")) == {
        "course begins anew in part",
        "eval_mode begins anew",
    }

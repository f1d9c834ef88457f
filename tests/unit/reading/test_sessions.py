"""Merged layouts and sessions of a run."""

from __future__ import annotations

import random
from time import process_time
from timeit import repeat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.reading.sessions import Sessions, Structure, WrittenLayout, assemble
from telemetry.reading.sources import Problems
from tests.helpers.known_runs import layout_of

orders = st.lists(
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8), min_size=1, max_size=5
)


def merged(layouts: list[list[str]]) -> Structure:
    """Return the structure of a run of several sessions, oldest first."""
    parsed = [
        WrittenLayout(f"{n:03d}", 0, n, layout_of(names), ()) for n, names in enumerate(layouts)
    ]
    return assemble(parsed, {}, Problems())


@given(orders)
def test_layers_of_older_sessions_follow_their_predecessors(layouts: list[list[str]]) -> None:
    expected: list[str] = []
    for names in reversed(layouts):
        index = 0
        for name in names:
            if name not in expected:
                expected.insert(index, name)
            index = expected.index(name) + 1
    structure = merged(layouts)
    assert [layer.name for layer in structure.layers] == expected
    for segment, names in zip(structure.segments, layouts, strict=True):
        assert [expected[row] for row in segment.rows] == names


def test_a_layer_keeps_its_own_parameters() -> None:
    layers = merged([["a", "old"], ["b", "a"]]).layers
    assert [[p.name for p in layer.parameters] for layer in layers] == [
        [f"{layer.name}.weight"] for layer in layers
    ]


@pytest.mark.slow
def test_the_time_to_merge_layouts_in_other_orders_grows_as_their_modules() -> None:
    def least_s(count: int) -> float:
        names = [f"layers.{i}.attention" for i in range(count)]
        layouts = [names, random.Random(0).sample(names, count), names[::-1][: count // 2]]
        assert len(merged(layouts).layers) == count
        # Without garbage collection, which visits all objects of the process.
        return min(repeat(lambda: merged(layouts), number=1, repeat=3, timer=process_time))

    # 20 times the modules, more with misses of the cache; 400 times if it were quadratic.
    assert least_s(10_000) < 100 * least_s(500)


@given(st.dictionaries(st.text("ab", min_size=1, max_size=3), st.integers(0, 9)), st.text("abc"))
def test_a_session_ends_where_any_later_one_starts(starts: dict[str, int], session: str) -> None:
    later = [start for other, start in starts.items() if other > session]
    assert Sessions(starts.items()).end_of(session) == min(later, default=2**62)

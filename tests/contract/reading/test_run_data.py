"""Written runs are read back completely, by ``telemetry.read`` and by the page."""

from __future__ import annotations

import random
from pathlib import Path
from time import process_time
from timeit import repeat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import telemetry
from tests.helpers.known_runs import (
    COLUMN,
    LAYOUT,
    MISSING,
    alert_at,
    layout_of,
    matrices,
    norms,
    write_newer,
    write_run,
)
from tests.helpers.views import OpenView, ReadView

ONLY_PAGE = pytest.mark.parametrize("view", ["slow", "fast"], indirect=True)


def test_every_step_and_every_number_is_read_back(tmp_path: Path, view: OpenView) -> None:
    write_run(tmp_path, LAYOUT, steps=range(237), norms=norms, matrices=matrices, every=2)
    run = view(tmp_path)
    assert run.layers == ["a", "b.x", "b.y"]
    steps, values = run.matrix("grad_norm")
    assert steps == list(range(237))
    np.testing.assert_array_equal(values, np.stack([norms(step) for step in steps]))
    for statistic in ("activation_rms", "weight_norm", "dead_units"):
        steps, values = run.matrix(statistic)
        assert steps == list(range(0, 237, 2))
        assert (values == np.array(steps)[:, None]).all()


def test_gradient_rms_and_share_are_parts_of_the_norm(tmp_path: Path, view: OpenView) -> None:
    write_run(tmp_path, LAYOUT, steps=[0, 5], norms=norms)
    run = view(tmp_path)
    squares = norms(5).astype(np.float64) ** 2
    for statistic, expected in (
        ("grad_rms", norms(5) / np.sqrt(6)),
        ("grad_share", squares / squares.sum()),
    ):
        steps, values = run.matrix(statistic)
        assert steps[-1] == 5
        np.testing.assert_allclose(values[-1], expected, rtol=1e-6)
    steps, values = run.matrix("grad_share")
    assert (values[: steps.index(5)] == MISSING).all(), "all gradients of step 0 are zero"


@ONLY_PAGE
def test_only_the_requested_window_is_read(tmp_path: Path, view: OpenView) -> None:
    write_run(tmp_path, LAYOUT, steps=range(100), norms=norms)
    run = view(tmp_path)
    window = {"first_step": 31, "last_step": 33, "first_layer": 1, "last_layer": 1}
    steps, values = run.matrix("grad_norm", **window)
    assert steps == [31, 32, 33]
    assert values.tolist() == [[310], [320], [330]]
    _, shares = run.matrix("grad_share", **window)
    np.testing.assert_allclose(shares, 100 / 10101, rtol=1e-6)
    assert run.matrix("grad_norm", last_layer=99)[1].shape == (100, 3)
    assert run.matrix("grad_norm", first_layer=2**53)[1].shape == (100, 0)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["slow"], indirect=True)
def test_the_page_shows_the_largest_or_not_finite_number_of_each_cell(
    tmp_path: Path, view: OpenView
) -> None:
    """The page has at most 2,048 rows and 4 million cells."""
    draw = np.random.default_rng(0)
    grid = draw.random((1960, 2100), np.float32)
    grid[draw.random(grid.shape) < 0.01] = np.nan
    grid[draw.random(grid.shape) < 0.01] = np.inf
    write_run(
        tmp_path, layout_of([f"{i:04}" for i in range(2100)]), steps=range(1960),
        norms=lambda step: grid[step],
    )  # fmt: skip
    steps, values = view(tmp_path).matrix("grad_norm")
    assert steps == list(range(1960))
    expected = np.maximum.reduceat(grid, np.arange(0, 2100, 2), axis=1)
    np.testing.assert_array_equal(values, expected)  # NumPy's maximum is NaN if there is one
    part = view(tmp_path).matrix("grad_norm", last_layer=2047)
    assert part[0] == list(range(0, 1960, 2))
    expected = np.maximum.reduceat(grid[:, :2048], np.arange(0, 1960, 2), axis=0)
    np.testing.assert_array_equal(part[1], expected)


@pytest.mark.slow
@pytest.mark.parametrize("view", ["slow"], indirect=True)
def test_the_page_merges_neighboring_steps_of_many_units(tmp_path: Path, view: OpenView) -> None:
    """The page has at most a million extremes of a layer."""

    def units(step: int) -> np.ndarray:
        extremes = np.repeat([[-(step % 100) - 1, step % 100]], 3000, axis=0).astype(np.float32)
        extremes[0] = 0, step == 1
        return extremes

    write_run(tmp_path, LAYOUT, steps=range(400), norms=norms, units=units)
    header, arrays = view(tmp_path).client.arrays("units", run=".", layer="a")
    assert arrays["steps"].tolist() == list(range(0, 400, 2))
    largest = np.arange(1, 400, 2) % 100
    np.testing.assert_array_equal(arrays["extremes"][:, 7], np.stack([-largest - 1, largest], 1))
    assert header["dead"] == ["", *["0"] * 199]


def test_a_resumed_run_is_one_curve(tmp_path: Path, view: OpenView) -> None:
    write_run(
        tmp_path, LAYOUT, steps=range(40), norms=norms, matrices=matrices,
        alerts=[alert_at(4, "a"), alert_at(30, "a")],
    )  # fmt: skip
    write_run(
        tmp_path, LAYOUT, steps=range(25, 33), norms=lambda s: norms(s + 1),
        alerts=[alert_at(26, "b.x")],
    )  # fmt: skip
    run = view(tmp_path)
    assert run.alerts == [(4, "a"), (26, "b.x")]
    steps, values = run.matrix("grad_norm")
    assert steps == list(range(33))
    assert values[24:26, 0].tolist() == [24, 26]  # the second is of the resumed run
    assert run.matrix("activation_rms")[0] == list(range(25))


def test_layers_that_are_added_or_removed_keep_their_rows(tmp_path: Path, view: OpenView) -> None:
    for step, names in ((0, ["a", "old", "c"]), (1, ["a", "c", "new"])):
        write_run(
            tmp_path, layout_of(names), steps=[step],
            norms=lambda step: np.full(3, step, np.float32),
        )  # fmt: skip
    run = view(tmp_path)
    assert run.layers == ["a", "old", "c", "new"]
    assert run.matrix("grad_norm")[1].tolist() == [[0, 0, 0, MISSING], [1, MISSING, 1, 1]]


ONE = st.tuples(
    st.lists(st.sampled_from("abcdefgh"), unique=True, min_size=1), st.integers(0, 9),
    st.integers(1, 9),
)  # fmt: skip


@settings(settings.get_profile("brief"), max_examples=40)
@given(st.lists(ONE, min_size=1, max_size=5))
def test_a_run_that_is_resumed_replaces_its_steps_from_the_first_repeated_one_on(
    tmp_path_factory: pytest.TempPathFactory, sessions: list[tuple[list[str], int, int]]
) -> None:
    """Layers of older parts that count follow their predecessors."""
    log_dir = tmp_path_factory.mktemp("run")
    layers: list[str] = []
    expected: dict[int, dict[str, float]] = {}
    for number, (names, first, count) in enumerate(sessions):
        write_run(
            log_dir, layout_of(names), steps=range(first, first + count), losses=False,
            norms=lambda _, names=names, number=number: np.full(len(names), number, np.float32),
        )  # fmt: skip
        expected = {step: row for step, row in expected.items() if step < first}
        expected |= {first + i: dict.fromkeys(names, number) for i in range(count)}
    first_later = 10
    for names, first, _ in reversed(sessions):
        index = 0
        for name in names if first < first_later else ():
            if name not in layers:
                layers.insert(index, name)
            index = layers.index(name) + 1
        first_later = min(first, first_later)
    run = ReadView(log_dir)
    assert run.layers == layers
    steps, values = run.matrix("grad_norm")
    assert steps == sorted(expected)
    assert values.tolist() == [
        [expected[step].get(name, MISSING) for name in layers] for step in steps
    ]


@pytest.mark.slow
def test_the_time_to_merge_layouts_in_other_orders_grows_as_their_modules(tmp_path: Path) -> None:
    def least_s(count: int) -> float:
        names, log_dir = [f"layers.{i}.attention" for i in range(count)], tmp_path / str(count)
        orders = [names, random.Random(0).sample(names, count), names[::-1][: count // 2]]
        for step, order in enumerate(orders):
            write_run(log_dir, layout_of(order), steps=[step])
        return min(repeat(lambda: telemetry.read(log_dir), number=1, repeat=3, timer=process_time))

    # 20 times the modules, more with misses of the cache; 400 times if it were quadratic.
    assert least_s(10_000) < 100 * least_s(500)


@ONLY_PAGE
def test_the_series_of_a_layer_has_every_step_and_statistic(tmp_path: Path, view: OpenView) -> None:
    write_run(tmp_path, LAYOUT, steps=range(30), norms=norms, matrices=matrices, every=10)
    header, arrays = view(tmp_path).client.arrays("layer", run=".", layer="b.x")
    assert set(header["statistics"]) == {"grad_norm", "grad_rms", "grad_share", *COLUMN}
    number = header["statistics"].index("weight_norm")
    for part in ("steps", "values"):
        assert arrays[f"statistics{number}.{part}"].tolist() == [0, 10, 20]
    assert header["parameters"] == ["b.x.weight"]
    assert arrays["parameters0.values"].tolist() == [10.0 * step for step in range(30)]


def test_nan_and_infinity_are_read_back(tmp_path: Path, view: OpenView) -> None:
    values = np.array([np.nan, np.inf, MISSING], np.float32)
    write_run(tmp_path, LAYOUT, steps=[0], norms=lambda _: values)
    np.testing.assert_array_equal(view(tmp_path).matrix("grad_norm")[1], [values])


def test_a_newer_format_is_reported(tmp_path: Path) -> None:
    write_newer(tmp_path, 99)
    with pytest.raises(ValueError, match="format 99"):
        telemetry.read(tmp_path)


def test_runs_of_one_directory_stay_apart_and_the_newest_is_first(
    tmp_path: Path, view: OpenView
) -> None:
    for number, run in enumerate(("first", "second")):
        write_run(
            tmp_path, LAYOUT, steps=range(10 - 5 * number), norms=norms, run=run,
            time_of=lambda step, number=number: 1e9 + 100 * number + step,
            alerts=[alert_at(number, "a")],
        )  # fmt: skip
    newest, earlier = telemetry.read(tmp_path), telemetry.read(f"{tmp_path}@first")
    assert newest.earlier == (f"{tmp_path}@first",)
    assert view(tmp_path).matrix("grad_norm")[0] == [*range(5)]
    for found, steps in ((newest, 5), (earlier, 10)):
        assert [*found.layers.step.unique()] == [*range(steps)]
        assert [alert.step for alert in found.alerts] == [steps < 10]
        curves = found.scalars
        assert [*curves[curves.tag == "loss"].step] == [*range(steps)]
    with pytest.raises(FileNotFoundError, match="no run third"):
        telemetry.read(f"{tmp_path}@third")


@pytest.mark.parametrize("steps", [[*range(30), 2**50], [0, 2, 1, 2, 5]])
def test_distant_and_decreasing_steps_are_in_order(
    tmp_path: Path, view: OpenView, steps: list[int]
) -> None:
    """The last of equal steps counts."""
    places = {step: place for place, step in enumerate(steps)}
    order = iter(range(len(steps)))
    write_run(
        tmp_path, layout_of(["a"]), steps=steps,
        norms=lambda _: np.array([next(order)], np.float32),
    )  # fmt: skip
    found, values = view(tmp_path).matrix("grad_norm")
    assert found == sorted(places)
    assert values.ravel().tolist() == [places[step] for step in found]


def test_a_run_without_its_log_has_its_curves_and_says_what_is_missing(tmp_path: Path) -> None:
    write_run(tmp_path, LAYOUT, steps=range(3), norms=norms)
    for path in tmp_path.glob("*.runlog"):
        path.unlink()
    found = telemetry.read(tmp_path)
    curves = found.scalars
    assert [*curves[curves.tag == "loss"].step] == [0, 1, 2]
    assert (len(found.layers), found.alerts) == (0, ())
    [problem] = found.problems
    assert "there is no run log" in problem

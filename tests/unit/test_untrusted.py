"""Values of any file are converted to the expected type, or refused with their location."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import telemetry
from tests.helpers import hostile_runs
from tests.helpers.shell import call

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["NaN", "-Infinity", "\ud800", 2**63, 10**400, -1, 1.7e308, 5e-324]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a JSON value, outermost first."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(found for key, item in items for found in paths_in(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, text: bytes) -> bytes:
    """Draw the text with one or two values replaced or removed."""
    content = json.loads(text)
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = draw(st.sampled_from([found for found in paths_in(content) if found]))
        inner = content
        for key in outer:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = deepcopy(draw(json_values))
        else:
            del inner[last]
    return json.dumps(content).encode()


def written(folders: pytest.TempPathFactory, add: Callable[[Path], object]) -> Path:
    log_dir = folders.mktemp("run")
    hostile_runs.write_good_run(log_dir)
    add(log_dir)
    return log_dir


@pytest.mark.slow
@given(changed(hostile_runs.layout()))
def test_a_changed_layout_is_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    run = telemetry.read(written(tmp_path_factory, hostile_runs.add_layout(text)))
    names = list(run.modules.module_name)
    assert names[-2:] == list(hostile_runs.LAYERS)
    assert len(set(names)) == len(names)
    assert set(run.layers.module_name) == set(hostile_runs.LAYERS)
    assert len(run.problems) <= 1
    assert run.problems or len(names) > 2 or not json.loads(text)["modules"]


@pytest.mark.slow
@given(changed(hostile_runs.alert()))
def test_a_changed_alert_is_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    run = telemetry.read(written(tmp_path_factory, hostile_runs.add_alert(text)))
    assert len(run.alerts) + len(run.problems) == 2
    for alert in run.alerts:
        assert alert.title
        assert 0 <= alert.step <= 2**53
        assert isinstance(alert.value + alert.threshold, float)


@pytest.mark.slow
@given(changed(hostile_runs.flight()))
def test_a_changed_flight_file_is_explained_or_skipped(
    tmp_path_factory: pytest.TempPathFactory, text: bytes
) -> None:
    log_dir = tmp_path_factory.getbasetemp() / "flights"
    log_dir.mkdir(exist_ok=True)
    (log_dir / "flight-3.json").write_bytes(text)
    done = call("explain", log_dir)
    assert done.returncode == 0
    assert done.stdout.startswith((f"{log_dir}", "skipped"))


@pytest.mark.parametrize("value", ["nan", "-inf", "inf", 3, 0.5])
def test_numbers_and_names_of_nonfinite_numbers_are_accepted(tmp_path: Path, value: object) -> None:
    hostile_runs.write_good_run(tmp_path)
    hostile_runs.add_alert(hostile_runs.alert(value=value))(tmp_path)
    run = telemetry.read(tmp_path)
    assert (len(run.alerts), run.problems) == (2, ())
    np.testing.assert_equal(run.alerts[0].value, float(value))  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [True, None, "1", "x", [1], 10**400])
def test_a_value_that_is_not_a_number_is_refused_with_its_place(
    tmp_path: Path, value: object
) -> None:
    hostile_runs.write_good_run(tmp_path)
    hostile_runs.add_alert(hostile_runs.alert(value=value))(tmp_path)
    [problem] = telemetry.read(tmp_path).problems
    assert problem.endswith("value: must be a number")
    steps = {"step": [1, 2], "loss": [0.5, value], "grad_norm": [1, 1], "learning_rates": [[], []]}
    (tmp_path / "flight-3.json").write_bytes(hostile_runs.flight(steps=steps))
    assert ("steps.loss[1]: must be a number" in call("explain", tmp_path).stdout) == (
        value is not None  # a loss may be missing
    )

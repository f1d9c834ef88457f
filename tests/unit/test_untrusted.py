"""Values of any file are converted to the expected type, or refused with their location."""

from __future__ import annotations

import io
import json
import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry import untrusted
from telemetry.commands.explain import print_faults
from telemetry.commands.output import new_console
from telemetry.events.page_format import decode_alert, decode_layout
from tests.helpers import hostile_runs

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


@pytest.mark.slow
@given(changed(hostile_runs.layout()))
def test_a_changed_layout_is_valid_or_refused(text: bytes) -> None:
    try:
        layout, names = decode_layout(text)
    except ValueError:
        return
    assert len(layout.owners) == len(layout.parameters)
    assert all(0 <= parameter.size < 2**63 for parameter in layout.parameters)
    assert len(set(layout.position)) == len(layout.modules)
    assert all(type(name) is str for name in names)


@given(changed(hostile_runs.alert()))
def test_a_changed_alert_is_valid_or_refused(text: bytes) -> None:
    try:
        alert = decode_alert(text)
    except ValueError:
        return
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
    print_faults(log_dir, new_console(text := io.StringIO()))
    assert text.getvalue().startswith((f"{log_dir}", "skipped"))


def test_the_error_names_the_location_of_an_invalid_value() -> None:
    check = untrusted.check_of({"steps": [{"loss": (float,)}]})
    with pytest.raises(ValueError, match=r"^steps\[1\]\.loss\[0\]: must be a number$"):
        check({"steps": [{"loss": [1]}, {"loss": ["x"]}]})
    with pytest.raises(ValueError, match=r"^steps\[0\]: loss is missing$"):
        check({"steps": [{}]})


@pytest.mark.parametrize("value", ["nan", "-inf", "inf", 3, 0.5])
def test_numbers_and_names_of_nonfinite_numbers_are_accepted(value: object) -> None:
    assert isinstance(untrusted.check_of(float)(value), float)


@pytest.mark.parametrize("value", [True, None, "1", "x", [1], 10**400])
def test_a_value_that_is_not_a_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        untrusted.check_of(float)(value)


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"here")
    (tmp_path / "link").symlink_to(path)
    with untrusted.open_file(tmp_path / "link") as file:
        assert file.read() == b"here"
    os.mkfifo(tmp_path / "fifo")
    for other in (tmp_path / "fifo", "/dev/zero", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            untrusted.open_file(other)


def test_json_that_is_nested_too_deeply_or_too_large_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        untrusted.parse_json(hostile_runs.DEEP)
    monkeypatch.setattr(untrusted, "MAX_JSON_BYTES", 10)
    with pytest.raises(ValueError, match="larger than"):
        untrusted.parse_json(b"[" + b"0," * 10 + b"0]")

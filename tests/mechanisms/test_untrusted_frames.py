"""Frames of any content are read, or reported with their place; the rest of the run is shown."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import telemetry
from telemetry.events.framing import frame
from telemetry.events.message_pack import encode
from telemetry.events.run_log import Alerted, Frame, Hyperparameters, LossFound, decode
from telemetry.reading.faults import faults_of
from telemetry.reading.run import open_run
from telemetry.reading.run_entry import row_of
from telemetry.records.batches import Batch
from tests.helpers import hostile_runs
from tests.helpers.hostile_runs import (
    ALERTED,
    BEGIN,
    END,
    FULL_STEP,
    LAYERS,
    LAYOUT,
    LOGGED,
    NORMS,
    NOW,
    STEPS,
)
from tests.helpers.known_runs import alert_at

GOOD = [
    BEGIN, LAYOUT, NORMS, FULL_STEP, ALERTED, LOGGED, LossFound(3, NOW, "loss", 0),
    Hyperparameters(3, NOW, {"lr": 0.1}), END,
]  # fmt: skip

plain_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["NaN", "\x1b[2J", 2**53, 2**53 + 1, -1, 1.7e308, 5e-324]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths to all parts of a value, outermost first."""
    items: Any = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    return [path, *(found for key, item in items for found in paths_in(item, (*path, key)))]


@st.composite
def changed(draw: st.DrawFn, good: Frame) -> bytes:
    """Draw the data of a frame with one or two values replaced or removed."""
    content = msgspec.msgpack.decode(encode(good))
    for _ in range(draw(st.integers(1, 2))):
        *outer, last = draw(st.sampled_from([found for found in paths_in(content) if found]))
        inner = content
        for key in outer:
            inner = inner[key]
        if draw(st.booleans()):
            inner[last] = deepcopy(draw(plain_values))
        else:
            del inner[last]
    return msgspec.msgpack.encode(content)


@st.composite
def logs(draw: st.DrawFn) -> list[bytes]:
    """Draw the data of a file's frames: good and changed ones in any order, or any bytes."""
    some = draw(st.lists(st.sampled_from(GOOD), max_size=4))
    frames = [encode(good) for good in some]
    bad = st.one_of(*map(changed, GOOD), st.binary(max_size=50))
    for place in draw(st.lists(st.integers(0, 4), min_size=1, max_size=2)):
        frames.insert(place, draw(bad))
    return frames


def written(folders: pytest.TempPathFactory, frames: Iterable[bytes]) -> Path:
    log_dir = folders.mktemp("run")
    hostile_runs.write_good_run(log_dir)
    hostile_runs.file_at(log_dir, b"".join(map(frame, [encode(BEGIN), encode(LAYOUT), *frames])))
    return log_dir


@pytest.mark.slow
@given(logs())
def test_frames_of_any_content_are_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, frames: list[bytes]
) -> None:
    log_dir = written(tmp_path_factory, frames)
    run = telemetry.read(log_dir)
    assert set(LAYERS) <= set(run.modules.module_name)
    steps = set(run.layers[run.layers.statistic == "weight_norm"].step)
    assert 7 in [alert.step for alert in run.alerts] or len(steps) < STEPS  # hidden by a begin
    for alert in run.alerts:
        assert alert.title
        assert alert.message
    for layer in run.modules.module_name:
        run.units(layer)
    data = open_run(log_dir)
    assert row_of(data, "run", NOW)["name"] == "run"
    for fault in faults_of(data):
        assert fault["step"] >= 0
    assert len(run.problems) <= len(frames)


@pytest.mark.slow
@given(changed(LAYOUT))
def test_a_changed_layout_is_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    run = telemetry.read(written(tmp_path_factory, [data]))
    names = list(run.modules.module_name)
    assert set(LAYERS) <= set(names)
    assert len(set(names)) == len(names)
    assert set(run.layers.module_name) == set(LAYERS)
    assert len(run.problems) <= 1


@pytest.mark.slow
@given(changed(ALERTED))
def test_a_changed_alert_is_read_or_reported(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    run = telemetry.read(written(tmp_path_factory, [data]))
    values = msgspec.msgpack.decode(data)
    if isinstance(values, list) and values[:1] == [4]:
        assert len(run.alerts) + len(run.problems) == 2
    for alert in run.alerts:
        assert 0 <= alert.step <= 2**53
        assert isinstance(alert.value + alert.threshold, float)


def test_text_without_utf_8_and_ids_beyond_64_bits_are_written_as_text() -> None:
    alert = alert_at(3, "\ud800", batches=(Batch(step=3, ids=(2**70, 7)),))
    found = decode(encode(Alerted(3, NOW, alert))).alert
    assert found.module_name == r"\ud800"
    assert found.batches[0].ids == (str(2**70), 7)

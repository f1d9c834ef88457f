"""Records are written as values and read back unchanged."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from telemetry.alert import Consequence
from telemetry.events import FileWriter
from telemetry.events.page_format import (
    decode_alert,
    decode_layout,
    encode_alert,
    encode_layout,
    new_session_id,
)
from telemetry.layers import MATRIX_STATISTICS
from telemetry.reading.run_data import RunData
from telemetry.reading.sources import FileSource
from telemetry.records import Layout, StepRecord
from telemetry.writing.page import PageWriter
from tests.helpers.known_runs import alert_at, layout_of
from tests.helpers.serialized import tags_of

LAYOUT = layout_of(["a", "b"])


def record(
    step: int, *, layout: Layout = LAYOUT, wall_time: float = 0.0, **changes: Any
) -> StepRecord:
    count = len(layout.parameters)
    return StepRecord(
        step=step,
        wall_time=wall_time,
        layout=layout,
        grad_norms=np.arange(count) + float(step),
        grad_present=np.ones(count, dtype=bool),
        grad_finite=np.ones(count, dtype=bool),
        **changes,
    )


def write(log_dir: Path, records: Iterable[StepRecord], page: PageWriter | None = None) -> RunData:
    page = page or PageWriter()
    writer = FileWriter(log_dir)
    for item in records:
        writer.write_values(list(page.values_of(item)), item.step)
    writer.write_values(list(page.pending_values()), page.last_step)
    writer.close()
    return RunData(FileSource(log_dir))


def test_norms_of_every_step_are_kept(tmp_path: Path) -> None:
    run = write(tmp_path, [record(s, full=s % 10 == 0) for s in range(57)])
    found = run.matrix("grad_norm")
    assert found.steps.tolist() == list(range(57))
    assert found.values.tolist() == [[s, s + 1] for s in range(57)]
    assert run.matrix("nonfinite").steps.tolist() == list(range(0, 57, 10))


def test_norms_are_written_about_once_per_second() -> None:
    page = PageWriter()
    counts = [len(list(page.values_of(record(s, wall_time=s / 100)))) for s in range(350)]
    assert counts[0] == 1  # the layout
    assert sum(counts[1:]) == 4


def test_pending_values_have_a_time_limit() -> None:
    page = PageWriter()
    assert page.pending_s(100.0) is None
    list(page.values_of(record(0, wall_time=100.0)))
    list(page.values_of(record(1, wall_time=100.5)))
    assert page.pending_s(100.5) == pytest.approx(0.25)
    assert page.pending_s(101.0) == 0
    assert page.pending_s(50.0) == 0  # the clock was set back
    list(page.pending_values())
    assert page.pending_s(101.0) is None


@pytest.mark.slow
def test_large_norms_are_written_at_once() -> None:
    layout = layout_of([f"layer{i}" for i in range(40_000)])
    page = PageWriter()
    counts = [len(list(page.values_of(record(s, layout=layout)))) for s in range(5)]
    assert counts == [1, 1, 0, 1, 0]


def test_a_record_of_a_phase_is_not_written() -> None:
    page = PageWriter()
    assert list(page.values_of(record(3, phase="validation", full=True))) == []
    assert not page.begins_layout(record(3, phase="validation"))


def test_a_change_of_layout_keeps_pending_values(tmp_path: Path) -> None:
    wider = layout_of(["a", "b", "c"])
    run = write(tmp_path, [record(0), record(1), record(2, layout=wider), record(3, layout=wider)])
    found = run.matrix("grad_norm")
    assert found.steps.tolist() == [0, 1, 2, 3]
    assert found.values.tolist() == [[0, 1, -1], [1, 2, -1], [2, 3, 4], [3, 4, 5]]


def test_decreasing_steps_start_a_new_session(tmp_path: Path) -> None:
    run = write(tmp_path, [record(s) for s in (0, 1, 2, 3, 2, 3, 4)])
    assert run.matrix("grad_norm").steps.tolist() == [0, 1, 2, 3, 4]
    assert len(run._structure.sessions.begins) == 2


def test_steps_of_a_tag_never_decrease() -> None:
    page, last = PageWriter(), {}
    for step in (0, 1, 2, 3, 1, 2, 0, 5):
        for tag in tags_of(page.values_of(record(step, full=step % 2 == 0))):
            assert step > last.get(tag, -1)
            last[tag] = step


def test_a_later_writer_continues_an_earlier_one(tmp_path: Path) -> None:
    write(tmp_path, [record(s) for s in range(10)])
    run = write(tmp_path, [record(s, full=True) for s in range(5, 8)])
    assert run.matrix("grad_norm").steps.tolist() == list(range(8))


def test_alerts_have_separate_tags_and_are_read_back(tmp_path: Path) -> None:
    page = PageWriter()
    alerts = [
        alert_at(0, None),
        alert_at(
            0,
            "b",
            consequences=(Consequence(kind="vanishing", module_name="a"),),
            stage="escalated",
        ),
    ]
    assert len(tags_of(page.alert_value(alert, i) for i, alert in enumerate(alerts))) == 2
    writer = FileWriter(tmp_path)
    writer.write_values(list(page.values_of(record(0))), 0)
    for number, alert in enumerate(alerts):
        writer.write_values([page.alert_value(alert, number)], alert.step)
    writer.close()
    assert list(RunData(FileSource(tmp_path)).overview().alerts) == alerts


def test_the_first_record_of_a_layout_is_recognized_before_it_is_written() -> None:
    page = PageWriter()
    assert page.begins_layout(record(0))
    list(page.values_of(record(0)))
    assert not page.begins_layout(record(1))


def test_session_ids_differ_and_sort_by_age() -> None:
    ids = [new_session_id() for _ in range(3)]
    assert len(set(ids)) == 3
    assert [name.rpartition("-")[0] for name in ids] == sorted(n.rpartition("-")[0] for n in ids)


def test_texts_are_read_back_unchanged() -> None:
    layout, names = decode_layout(encode_layout(LAYOUT, MATRIX_STATISTICS))
    assert layout == LAYOUT
    assert names == tuple(statistic.name for statistic in MATRIX_STATISTICS)
    alert = alert_at(3, "a", value=float("inf"), summary="<img src=x onerror=alert(1)>")
    assert decode_alert(encode_alert(alert)) == alert


@pytest.mark.parametrize("text", [b"{", b"[]", b"{}", b'{"format": 1, "step": "x"}', b"\xff"])
def test_invalid_texts_are_value_errors(text: bytes) -> None:
    for decode in (decode_alert, decode_layout):
        with pytest.raises(ValueError):  # noqa: PT011 - several messages
            decode(text)

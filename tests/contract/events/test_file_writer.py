from __future__ import annotations

import copy
import pickle
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.events import FileWriter, list_event_files, read_events, summaries
from tests.helpers.board import ReadBoard
from tests.helpers.disks import FreezableDisk
from tests.helpers.serialized import summary_of

EVERY_CHARACTER = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def read_summaries(log_dir: Path) -> list[Event]:
    """Return the events with a summary in all files of a run."""
    files = [read_events(path) for path in list_event_files(log_dir)]
    return [event for events in files for event in events if event.HasField("summary")]


def add_scalar(writer: FileWriter, step: int, *, droppable: bool = False) -> None:
    writer.write_values([summaries.scalar("loss", step)], step, droppable=droppable)


def test_values_of_a_step_are_one_event(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    values = [summaries.scalar("loss", 0.5), summaries.text("note", "fine")]

    writer.write_values(values, 7, 12.5)
    writer.close()

    (event,) = read_summaries(tmp_path)
    assert event == Event(step=7, wall_time=12.5, summary=summary_of(values))


def test_an_event_is_copied_when_it_is_added(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    event = Event(summary=summary_of([summaries.scalar("loss", 0.5)]))

    for step in (np.int64(3), 4.0):
        writer.add_event(event, step, walltime=1.0)
    event.summary.value[0].simple_value = 9.0
    writer.close()

    written = read_summaries(tmp_path)
    assert [found.step for found in written] == [3, 4]
    assert {found.summary.value[0].simple_value for found in written} == {0.5}


def test_events_carry_the_time_of_adding(tmp_path: Path) -> None:
    before = time.time()
    writer = FileWriter(tmp_path)

    add_scalar(writer, 0)
    writer.write_values([summaries.scalar("loss", 1.0)], 1)
    writer.close()

    assert all(before <= event.wall_time <= time.time() for event in read_summaries(tmp_path))


def test_a_flush_writes_events_to_the_file(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path, flush_s=3600)

    for step in range(5):
        add_scalar(writer, step)
        writer.flush()
        assert len(read_summaries(tmp_path)) == step + 1

    writer.close()


@pytest.mark.parametrize(("value", "step"), [("high", 0), (0.5, "first"), (0.5, 2**63)])
def test_wrong_arguments_raise_at_once(tmp_path: Path, value: object, step: object) -> None:
    writer = FileWriter(tmp_path)

    with pytest.raises((TypeError, ValueError)):
        writer.write_values([summaries.scalar("loss", value)], step)  # type: ignore[arg-type]

    writer.close()


@pytest.mark.parametrize("log_dir", ["runs/\0", "no-such-protocol://bucket/run"])
def test_a_directory_that_cannot_exist_is_refused(log_dir: str) -> None:
    with pytest.raises(ValueError, match=r"NUL|no-such-protocol"):
        FileWriter(log_dir)


def test_a_closed_writer_refuses_events(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    writer.close()
    writer.close()
    writer.flush()

    with pytest.raises(OSError, match="closed"):
        add_scalar(writer, 0)


@pytest.mark.slow
def test_tags_of_every_character_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    tags = ["".join(EVERY_CHARACTER[i : i + 999]) for i in range(0, len(EVERY_CHARACTER), 999)]
    writer = FileWriter(tmp_path / "run")

    writer.write_values([summaries.scalar(tag, 1.0) for tag in tags], 3)
    writer.close()

    assert read_board(tmp_path).scalars()["run"] == {tag: [(3, 1.0)] for tag in tags}


def test_an_unpaired_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="surrogates"):
        summaries.scalar("\ud800", 1.0)


def test_a_tag_of_ten_thousand_characters_is_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    writer = FileWriter(tmp_path / "run")

    writer.write_values([summaries.scalar("ß/" * 5000, 1.0)], 3)
    writer.close()

    assert read_board(tmp_path).scalars()["run"] == {"ß/" * 5000: [(3, 1.0)]}


def test_large_steps_are_shown(tmp_path: Path, read_board: ReadBoard) -> None:
    steps = [0, 1, 2**31, 2**32, 2**53 + 1, 2**62]
    writer = FileWriter(tmp_path / "run")

    for step in steps:
        writer.write_values([summaries.scalar("loss", 1.0)], step)
    writer.close()

    assert read_board(tmp_path).scalars()["run"]["loss"] == [(step, 1.0) for step in steps]


def test_a_clock_that_goes_back_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_board: ReadBoard
) -> None:
    now = 1.8e9
    monkeypatch.setattr(time, "time", lambda: now)

    for first in (0, 5):
        writer = FileWriter(tmp_path / "run")
        for step in range(first, first + 5):
            add_scalar(writer, step)
            now -= 1e7
        writer.close()

    shown = read_board(tmp_path).scalars()["run"]["loss"]
    assert [step for step, _ in shown] == list(range(10))


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.floats(width=32)),
        min_size=1,
        max_size=5,
    ),
    st.integers(0, 2**63 - 1),
)
def test_written_values_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, scalars: list[tuple[str, float]], step: int
) -> None:
    log_dir = tmp_path_factory.mktemp("run")
    writer = FileWriter(log_dir)

    writer.write_values([summaries.scalar(tag, value) for tag, value in scalars], step)
    writer.close()

    (event,) = read_summaries(log_dir)
    assert event.step == step
    assert [value.tag for value in event.summary.value] == [tag for tag, _ in scalars]
    np.testing.assert_array_equal(
        [value.simple_value for value in event.summary.value], [value for _, value in scalars]
    )


def test_events_for_a_full_disk_are_written_later_or_counted_as_dropped(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(bytes(110_000))
    writer = FileWriter(tiny_disk / "run", flush_s=3600, max_pending_bytes=30_000)
    step = 0

    while writer.failure is None:  # until the disk is full
        writer.write_values([summaries.text("note", "x" * 500)], step)
        writer.flush()
        step += 1
    outage = range(step, step + 100)
    for step in outage:  # until the queue is full, too
        writer.write_values([summaries.text("note", "x" * 500)], step, droppable=True)
    add_scalar(writer, step + 1)
    ballast.unlink()
    writer.flush()
    add_scalar(writer, step + 2)
    writer.close()

    written = [event.step for event in read_summaries(tiny_disk / "run")]
    kept = len(written) - outage.start - 2
    assert 0 < kept < 100
    assert written == [*range(outage.start + kept), step + 1, step + 2]
    assert (writer.dropped_count, writer.lost_count) == (100 - kept, 0)
    reported = [record.getMessage() for record in caplog.records]
    assert len(reported) == 2
    assert "No space left on device" in reported[0]
    assert f"{100 - kept} measurements were dropped" in reported[1]


def test_closing_the_writer_reports_records_that_were_never_written(
    tiny_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = FileWriter(tiny_disk / "run")
    writer.flush()
    (tiny_disk / "ballast").write_bytes(bytes(100_000))

    for step in range(50):
        writer.write_values([summaries.text("note", "x" * 2000)], step)
    writer.close()

    written = len(read_summaries(tiny_disk / "run"))
    assert 0 < written < 50
    assert writer.lost_count == 50 - written
    assert f"{50 - written} events could not be written" in caplog.messages[-1]


def test_a_hanging_disk_costs_the_timeout_once(
    freezable_disk: FreezableDisk, caplog: pytest.LogCaptureFixture
) -> None:
    writer = FileWriter(freezable_disk.path / "run")
    writer.flush()

    with freezable_disk.frozen():
        for step in range(300):
            add_scalar(writer, step)
        assert not writer.flush(timeout_s=0.1)
        began = time.monotonic()
        writer.close(timeout_s=0.2)
        writer.close()
        assert time.monotonic() - began < 2
        assert writer.lost_count == 300
        (reported,) = caplog.messages

    assert "300 events could not be written (a write that began " in reported


def test_records_that_readers_need_are_repeated_in_each_new_file(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    for step in range(2):
        layout = summaries.text("layout", f"version {step}")
        values = [summaries.scalar("loss", 0.5), layout]
        writer.write_values(values, step, 12.5 + step, repeat=[layout])
    writer.flush()

    shutil.rmtree(tmp_path)
    add_scalar(writer, 7)
    writer.close()

    again, loss = read_summaries(tmp_path)
    assert again == Event(step=1, wall_time=13.5, summary=summary_of([layout]))
    assert loss.step == 7


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_copy_of_a_writer_writes_nothing_and_logs_it_once(
    tmp_path: Path, duplicate: object, caplog: pytest.LogCaptureFixture
) -> None:
    writer = FileWriter(tmp_path)
    copied = duplicate(writer)  # type: ignore[operator]
    if isinstance(copied, bytes):
        copied = pickle.loads(copied)

    add_scalar(copied, 1)
    add_scalar(copied, 2)
    copied.flush()
    copied.close()
    add_scalar(writer, 3)
    writer.close()

    assert [event.step for event in read_summaries(tmp_path)] == [3]
    assert copied.get_logdir() == str(tmp_path)
    assert (copied.dropped_count, copied.lost_count, copied.failure) == (0, 0, None)
    (reported,) = caplog.messages
    assert "writes nothing" in reported

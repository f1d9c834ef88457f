"""A run is read from its event files as TensorBoard would read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from torch.utils.tensorboard import SummaryWriter

from telemetry.events import FileWriter, summaries
from telemetry.reading import sources
from telemetry.reading.sources import FileSource
from tests.helpers.serialized import histogram


def test_scalars_of_either_style_are_read(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("old", 1.5, 0)
        writer.add_scalar("new", 2.5, 3, new_style=True)
    found = FileSource(tmp_path).read("scalars", ["old", "new", "none"])
    assert found == {"old": [(0, 1.5)], "new": [(3, 2.5)]}


def test_steps_that_a_resumed_run_overwrites_are_omitted(tmp_path: Path) -> None:
    first = FileWriter(tmp_path)
    for step in range(5):
        first.write_values([summaries.scalar("loss", step)], step)
    first.close()
    second = FileWriter(tmp_path)
    second.add_event(Event(session_log=SessionLog(status=SessionLog.START)), 2)
    second.write_values([summaries.scalar("loss", 9)], 2)
    second.close()
    assert FileSource(tmp_path).read("scalars", ["loss"]) == {"loss": [(0, 0), (1, 1), (2, 9)]}


def test_pictures_and_histograms_are_read(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    writer.write_values([summaries.image("map", [b"\x89PNG"], 2, 3)], 4)
    writer.write_values([histogram("h", [0.0], [1.0], [2.0])], 4)
    writer.close()
    source = FileSource(tmp_path)
    assert source.tags("images") == {"map": 4}
    assert source.picture("map", 4) == b"\x89PNG"
    assert source.picture("map", 5) is None
    [(_, table)] = source.read("histograms", ["h"])["h"]
    np.testing.assert_array_equal(table, [[0, 1, 2]])


def test_an_inconsistent_histogram_of_torch_is_skipped_and_reported(tmp_path: Path) -> None:
    good = HistogramProto(min=0, max=2, bucket_limit=[1, 2], bucket=[3, 4])
    bad = HistogramProto(min=0, max=2, bucket_limit=[1], bucket=[3, 4, 5])
    event = Event(step=1)
    for tag, histo in (("good", good), ("bad", bad)):
        event.summary.value.add(tag=tag, histo=histo)
    writer = FileWriter(tmp_path)
    writer.add_event(event, 1)
    writer.close()
    source = FileSource(tmp_path)
    assert list(source.tags("histograms")) == ["good"]
    assert [line.partition(":")[0] for line in source.problems] == ["skipped bad"]


def test_a_damaged_file_is_reported_and_the_rest_is_read(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path)
    writer.write_values([summaries.scalar("loss", 1)], 0)
    writer.close()
    path = next(tmp_path.iterdir())
    path.write_bytes(path.read_bytes() + bytes(range(1, 60)))
    source = FileSource(tmp_path)
    [problem] = source.problems
    assert "damaged" in problem
    assert source.read("scalars", ["loss"]) == {"loss": [(0, 1)]}


def test_a_directory_without_event_files_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no event files in"):
        FileSource(tmp_path / "nothing")


def test_data_beyond_the_limit_is_omitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = FileWriter(tmp_path)
    for step in range(10):
        writer.write_values([summaries.scalar("loss", step)], step)
    writer.close()
    monkeypatch.setitem(sources.MAX_KEPT_BYTES, "scalars", 2000)
    source = FileSource(tmp_path)
    assert [step for step, _ in source.read("scalars", ["loss"])["loss"]] == [0, 1, 2, 3]
    assert len(list(source.problems)) == 1

"""Data of TensorBoard's own dashboards is read as TensorBoard would read it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import Run
from tests.helpers.known_runs import layout_of, write_dashboards, write_run


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    write_run(tmp_path, layout_of(["a"]), steps=[0], losses=False)
    return tmp_path


def points(run: Run, tag: str) -> list[tuple[int, float]]:
    rows = run.scalars[run.scalars.tag == tag]
    return list(zip(rows.step, rows.value, strict=True))


def test_scalars_of_either_style_are_read(log_dir: Path) -> None:
    with SummaryWriter(str(log_dir)) as writer:
        writer.add_scalar("old", 1.5, 0)
        writer.add_scalar("new", 2.5, 3, new_style=True)
    run = telemetry.read(log_dir)
    assert (points(run, "old"), points(run, "new")) == ([(0, 1.5)], [(3, 2.5)])


def test_steps_that_a_resumed_run_overwrites_are_omitted(log_dir: Path) -> None:
    write_dashboards(log_dir, scalars={"loss": {step: step for step in range(5)}})
    write_dashboards(log_dir, scalars={"loss": {2: 9}}, restart_at=2)
    assert points(telemetry.read(log_dir), "loss") == [(0, 0), (1, 1), (2, 9)]


def test_histograms_are_read_and_inconsistent_ones_of_torch_are_reported(log_dir: Path) -> None:
    write_dashboards(log_dir, histograms={"h": {4: ([0.0], [1.0], [2.0])}})
    event = Event(step=1)
    for tag, limits, counts in (("good", [1, 2], [3, 4]), ("bad", [1], [3, 4, 5])):
        histogram = HistogramProto(min=0, max=2, bucket_limit=limits, bucket=counts)
        event.summary.value.add(tag=tag, histo=histogram)
    with SummaryWriter(str(log_dir)) as writer:
        writer.file_writer.add_event(event)
    run = telemetry.read(log_dir)
    assert run.histogram_tags == ("good", "h")
    np.testing.assert_array_equal(run.histogram("h")[4], [[0, 1, 2]])
    np.testing.assert_array_equal(run.histogram("good")[1], [[0, 1, 3], [1, 2, 4]])
    assert [line.partition(":")[0] for line in run.problems] == ["skipped bad"]


def test_a_damaged_file_is_reported_and_the_rest_is_read(log_dir: Path) -> None:
    write_dashboards(log_dir, scalars={"loss": {0: 1.0}})
    path = max(log_dir.iterdir())
    path.write_bytes(path.read_bytes() + bytes(range(1, 60)))
    run = telemetry.read(log_dir)
    [problem] = run.problems
    assert "damaged" in problem
    assert points(run, "loss") == [(0, 1.0)]

"""Queue between training and the worker: its limits in bytes, and when the worker wakes."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import telemetry
from telemetry import StepRecord
from telemetry.capture import Content, Step
from telemetry.capture.context import Context, Guard
from telemetry.capture.schedule import Stopwatch
from telemetry.capture.step import FullStep
from telemetry.failures import Failures
from telemetry.pipeline import Pipeline, queue
from telemetry.run.files import RunFiles
from telemetry.selection import Selection
from telemetry.tag_names import plain
from tests.helpers.figures import figures
from tests.helpers.serialized import summary_of
from tests.helpers.tiny_run import TinyRun
from tests.helpers.twins import Blocked, Recorder

WATCHDOG_S = 120


@pytest.mark.parametrize("kind", [Step, FullStep])
def test_a_queued_step_allocates_about_the_counted_bytes(kind: type[Step]) -> None:
    guard = Guard(Failures(), Stopwatch(is_on=False))
    model, selection = nn.Linear(2, 2), Selection.parse(None)
    context = Context(model, selection=selection, content=Content(), guard=guard, first_step=0)
    kept = [kind(context) for _ in range(1000)]
    tracemalloc.start()
    kept = [kind(context) for _ in range(1000)]
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(step.nbytes for step in kept) == pytest.approx(allocated, rel=0.5)


def train_ahead(log_dir: Path, steps: int, every: int) -> list[StepRecord]:
    """Return the records of steps that end while the rule has not judged the first one."""
    blocked, recorder = Blocked(), Recorder()
    run = TinyRun(log_dir, alerts=[blocked, recorder], every_n_steps=every)
    with run.logger as logger:
        for _ in range(steps):
            run.train()
            assert blocked.entered.wait(WATCHDOG_S)
        with logger.phase("validation"):  # stays one, so that no rule receives it
            run.model(torch.ones(4, 2))
        blocked.may_judge.set()
    return recorder.records


def test_full_steps_above_the_first_high_water_mark_are_downgraded_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue, "MAX_DETAIL_BYTES", 0)
    records = train_ahead(tmp_path, steps=4, every=1)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.full for record in records] == [True, False, False, False]
    assert [len(record.weights) for record in records] == [2, 0, 0, 0]
    assert {*telemetry.read(tmp_path).layers["step"]} == {0, 1, 2, 3}
    at_once, at_close = [text for text in caplog.messages if "norms alone" in text]
    assert (figures(at_once)[0], figures(at_close)) == (1, [4])


def test_steps_above_the_second_high_water_mark_are_dropped_and_scalars_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    submit = Pipeline.submit

    def spy(pipeline: Pipeline, step: Step) -> None:
        sizes.append(step.nbytes)
        if len(sizes) == 3:
            monkeypatch.setattr(queue, "MAX_BYTES", sum(sizes) - 1)
        submit(pipeline, step)

    monkeypatch.setattr(Pipeline, "submit", spy)
    records = train_ahead(tmp_path, steps=10, every=100)
    assert [record.step for record in records] == [0, 1, 2]
    scalars = telemetry.read(tmp_path).scalars
    assert scalars[scalars.tag == "count"].step.tolist() == [*range(10)]
    [at_once] = [text for text in caplog.messages if "is not recorded" in text]
    [at_close] = [text for text in caplog.messages if "were dropped" in text]
    assert (figures(at_once)[0], figures(at_close)) == (3, [8])


def test_measurements_may_be_dropped_by_the_writer_and_users_scalars_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    droppable: dict[tuple[int, str], bool] = {}
    write = RunFiles.write_values

    def spy(files: RunFiles, values: Sequence[bytes], step: int, *args: Any, **to: Any) -> None:
        for value in summary_of(values).value:
            droppable[step, plain(value.tag)] = to.get("droppable", False)
        write(files, values, step, *args, **to)

    monkeypatch.setattr(RunFiles, "write_values", spy)
    run = TinyRun(tmp_path)
    with run.logger:
        run.train(2)
    assert droppable[1, "grad_norm/total"]
    assert not droppable[1, "count"]

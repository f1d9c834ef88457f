"""Seconds per step are a mean over steps of training, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from board import Board, open_slow
from serialized import parsed
from small_records import full_record
from torch import nn

from telemetry import HookLogger
from telemetry.records import StepRecord
from telemetry.writing.step_times import StepTimes


def points(times: StepTimes, record: StepRecord) -> dict[str, float]:
    return {(v := parsed(value)).tag: v.simple_value for value in times.values_of(record)}


def pass_steps(times: StepTimes, steps: Sequence[int], wall_times: Sequence[float]) -> None:
    """Steps that are not measured in full, and have no point."""
    for step, time_s in zip(steps, wall_times, strict=True):
        assert points(times, full_record(step, wall_time=time_s, full=False)) == {}


def test_a_point_is_the_mean_since_the_last_one_in_full_or_not() -> None:
    times = StepTimes()
    assert points(times, full_record(0, wall_time=100.0)) == {}
    pass_steps(times, [1, 2, 3], [101.0, 103.0, 104.0])
    assert points(times, full_record(4, wall_time=105.0, full=False)) == {}
    found = points(times, full_record(5, wall_time=110.0, examples=8))
    assert found == {"~run/time/step_s": 2.0, "~run/time/examples_per_s": 4.0}
    assert points(times, full_record(6, wall_time=111.0)) == {"~run/time/step_s": 1.0}


def test_the_time_of_a_phase_does_not_count() -> None:
    times = StepTimes()
    points(times, full_record(0, wall_time=100.0))
    pass_steps(times, [1, 2], [101.0, 102.0])
    assert points(times, full_record(3, wall_time=500.0, phase="validation")) == {}
    pass_steps(times, [3, 4], [600.0, 603.0])
    assert points(times, full_record(5, wall_time=604.0)) == {"~run/time/step_s": 1.5}
    points(times, full_record(6, wall_time=900.0, phase="validation"))
    assert points(times, full_record(6, wall_time=999.0)) == {}, "no step without the phase"


@pytest.mark.parametrize(("step", "wall_time"), [(1, 104.0), (4, 99.0)])
def test_steps_and_clocks_that_go_back_have_no_point(step: int, wall_time: float) -> None:
    times = StepTimes()
    points(times, full_record(3, wall_time=100.0))
    assert points(times, full_record(step, wall_time=wall_time)) == {}
    assert points(times, full_record(step + 2, wall_time=wall_time + 1)) == {
        "~run/time/step_s": 0.5
    }


def train(logger: HookLogger, model: nn.Module, *, validates: bool) -> None:
    """Nine steps of two micro-batches with eight examples, and passes that are no training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(9):
        for size in (5, 3):
            model(torch.randn(size, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(torch.randn(100, 4))
        if validates:
            with logger.phase("validation"):
                model(torch.randn(100, 4))


@pytest.mark.parametrize("validates", [False, True])
def test_a_run_has_both_curves_with_the_examples_of_all_micro_batches(
    tmp_path: Path, validates: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    with HookLogger(model, tmp_path, every_n_steps=4, alerts=()) as logger:
        train(logger, model, validates=validates)
    curves = Board(open_slow(tmp_path)).scalars()["."]
    if validates:
        assert "time/step_s" not in curves, "there is a phase in each"
        return
    step_s, per_s = dict(curves["time/step_s"]), dict(curves["time/examples_per_s"])
    assert list(step_s) == list(per_s) == [4, 8]
    for step in step_s:
        assert per_s[step] * step_s[step] == pytest.approx(8)

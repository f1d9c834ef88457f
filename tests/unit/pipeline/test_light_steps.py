"""Fast loops: norms are measured at one usual step in k and at all steps after an unusual one."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from telemetry import HookLogger, StepRecord, read
from telemetry.alert import Alert
from telemetry.alerts.detector import Detector, Finding
from telemetry.pipeline import LightSteps, schedule
from telemetry.pipeline.schedule import DECISION_STEPS, DENSE_STEPS, FIRST_STEPS, MAX_EVERY
from telemetry.tag_names import RUN
from tests.helpers.plain_events import EventAccumulator

STEP_S = 0.001


def measured_steps(
    steps: LightSteps, count: int, *, cost: float, first: int = 0, unusual: int | None = None
) -> list[int]:
    """Return the steps at which norms are measured, where norms cost ``cost`` of a step."""
    numbers = []
    for number in range(first, first + count):
        if number == unusual:
            steps.take_next(number)
        if steps.have_norms(number):
            numbers.append(number)
            steps.add(number, number * STEP_S, cost * STEP_S)
    return numbers


def test_norms_that_cost_at_most_three_percent_are_measured_at_each_step() -> None:
    steps = LightSteps()
    assert measured_steps(steps, 2000, cost=0.024) == list(range(2000))
    assert steps.every == 1


@pytest.mark.parametrize(("cost", "every"), [(0.04, 2), (0.17, 7), (10.0, MAX_EVERY)])
def test_faster_steps_are_measured_at_every_kth_step(cost: float, every: int) -> None:
    steps = LightSteps()
    numbers = measured_steps(steps, FIRST_STEPS + 100, cost=cost)
    assert steps.every == every
    later = [number for number in range(FIRST_STEPS, FIRST_STEPS + 100) if number % every == 0]
    assert numbers == [*range(FIRST_STEPS), *later]


def test_slower_steps_are_all_measured_again() -> None:
    steps = LightSteps()
    measured_steps(steps, FIRST_STEPS, cost=2.0)
    assert steps.every == MAX_EVERY
    measured_steps(steps, 2 * DECISION_STEPS * MAX_EVERY, first=FIRST_STEPS, cost=0.01)
    assert steps.every == 1


def test_64_steps_after_an_unusual_one_are_all_measured() -> None:
    steps, unusual = LightSteps(), 501
    numbers = measured_steps(steps, 1000, cost=1.0, unusual=unusual)
    assert [n for n in numbers if unusual <= n <= unusual + DENSE_STEPS] == list(range(501, 566))
    assert len(numbers) < FIRST_STEPS + DENSE_STEPS + 60


def test_a_loss_above_its_limit_or_not_finite_is_unusual() -> None:
    steps = LightSteps()
    steps.every, steps.loss_tag, steps.loss_limit = 16, "loss", 2.0
    assert not steps.check_logged(3, {"loss": 2.0, "other": 9.0})
    assert not steps.have_norms(3)
    for loss in (2.1, math.inf, math.nan):
        steps.every, steps._dense_until = 16, -1
        assert steps.check_logged(5, {"loss": loss})
        assert steps.have_norms(5)
        assert steps.have_norms(5 + DENSE_STEPS)
        assert not steps.have_norms(6 + DENSE_STEPS)


def test_without_a_limit_norms_are_measured_at_each_step() -> None:
    assert len(measured_steps(LightSteps(limited=False), 1000, cost=1.0)) == 1000


# --- in a run ------------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the allowed share, so that each step costs too much."""
    monkeypatch.setattr(schedule, "SHARE", 1e-6)


class EachStep(Detector):
    """Custom detector that stores the number of each step."""

    kind = "each_step"

    def set_up(self) -> None:
        self.steps: list[int] = []

    def find(self, record: StepRecord, baseline: Any) -> Finding | None:
        self.steps.append(record.step)
        return None


def train(log_dir: Path, *, steps: int = 600, spike: int | None = None, **options: Any) -> Any:
    """Return the alerts and the steps whose gradient norms are in the event file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with HookLogger(model, log_dir, images=False, **options) as logger:
        for number in range(steps):
            x = torch.randn(64, 4)
            y = x.sum(1, keepdim=True) * (300 if number == spike else 1)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
    return logger.alerts, steps_in(log_dir)


def steps_in(log_dir: Path) -> list[int]:
    """Return the steps whose gradient norms are in the event file."""
    table = read(log_dir).layers
    return [int(number) for number in np.unique(table["step"])]


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_healthy_run_has_norms_of_some_steps_and_each_loss(tmp_path: Path) -> None:
    alerts, steps = train(tmp_path)
    assert alerts == ()
    assert steps[:FIRST_STEPS] == list(range(FIRST_STEPS))
    later = [number for number in steps if number >= FIRST_STEPS]
    assert len(later) < 344 / 2  # with those after unusual ones
    assert {300, 400, 500} <= {*later}  # full steps
    accumulator = EventAccumulator(str(tmp_path), {"scalars": 0})
    accumulator.Reload()
    assert len(accumulator.Scalars("loss")) == 600
    every = [event.value for event in accumulator.Scalars(f"{RUN}telemetry/norms_every_n_steps")]
    assert {*every} == {MAX_EVERY}


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_a_loss_spike_is_found_at_its_step_and_the_next_64_are_measured(tmp_path: Path) -> None:
    rules = {"weight_jump": None}  # depending on when the next full step comes, it speaks first
    alerts, steps = train(tmp_path / "fast", spike=507, alerts=rules)
    slow, _ = train(tmp_path / "slow", spike=507, max_overhead=math.inf, alerts=rules)
    assert {*range(507, 571)} <= {*steps}
    assert ("loss_spike", 507) in started(alerts)
    assert ("loss_spike", 507) in started(slow)


def started(alerts: tuple[Alert, ...]) -> set[tuple[str, int]]:
    return {(alert.kind, alert.step) for alert in alerts if alert.stage == "started"}


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_custom_rules_and_detectors_receive_every_step(tmp_path: Path) -> None:
    seen: list[int] = []

    def rule(record: StepRecord) -> list[Alert]:
        seen.append(record.step)
        return []

    train(tmp_path / "rule", alerts=[rule])
    assert seen == list(range(600))
    detector = EachStep()
    train(tmp_path / "detector", alerts={"each_step": detector})
    assert detector.steps == list(range(600))


@pytest.mark.slow
@pytest.mark.usefixtures("fast")
def test_without_rules_no_step_is_unusual(tmp_path: Path) -> None:
    _, steps = train(tmp_path, alerts=())
    assert len(steps) < FIRST_STEPS + 60


@pytest.mark.slow
def test_the_limit_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fast: None
) -> None:
    with caplog.at_level(logging.INFO, "telemetry"):
        train(tmp_path, steps=900)
    lines = [message for message in caplog.messages if "norms_every_n_steps" in message]
    assert len(lines) == 1
    assert "max_overhead=math.inf" in lines[0]


@pytest.mark.slow
def test_an_infinite_max_overhead_measures_each_step(tmp_path: Path, fast: None) -> None:
    _, steps = train(tmp_path, alerts=(), max_overhead=math.inf)
    assert steps == list(range(600))

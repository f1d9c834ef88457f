"""Fast loops: norms are measured at one usual step in k and at all steps after an unusual one."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from telemetry import Alert, Detector, Finding, HookLogger, StepRecord, read
from telemetry.pipeline import LightSteps, schedule
from tests.helpers.twins import Recorder

STEP_S = 0.001
FIRST = 256  # steps that are all measured


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


@pytest.mark.parametrize(("cost", "every"), [(0.024, 1), (0.04, 2), (0.17, 7), (10.0, 64)])
def test_norms_that_cost_more_than_two_and_a_half_percent_are_measured_at_every_kth_step(
    cost: float, every: int
) -> None:
    numbers = measured_steps(LightSteps(), FIRST + 200, cost=cost)
    later = [number for number in range(FIRST, FIRST + 200) if number % every == 0]
    assert numbers == [*range(FIRST), *later]


def test_slower_steps_are_all_measured_again() -> None:
    steps = LightSteps()
    measured_steps(steps, FIRST, cost=2.0)
    assert steps.every == 64
    measured_steps(steps, 2 * 16 * 64, first=FIRST, cost=0.01)
    assert steps.every == 1


def test_64_steps_after_an_unusual_one_are_all_measured() -> None:
    numbers = measured_steps(LightSteps(), 1000, cost=1.0, unusual=501)
    assert [n for n in numbers if 501 <= n <= 565] == [*range(501, 566)]
    assert len(numbers) < FIRST + 64 + 60


@pytest.mark.parametrize("loss", [2.1, math.inf, math.nan])
def test_a_loss_above_its_limit_or_not_finite_is_unusual(loss: float) -> None:
    steps = LightSteps()
    steps.every, steps.loss_tag, steps.loss_limit = 16, "loss", 2.0
    assert not steps.check_logged(3, {"loss": 2.0, "other": 9.0})
    assert not steps.have_norms(3)
    assert steps.check_logged(5, {"loss": loss})
    assert [n for n in range(5, 90) if steps.have_norms(n)] == [*range(5, 70), 80]


# --- in a run ------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the allowed share in runs, so that each step costs too much."""
    if "tmp_path" in request.fixturenames:
        monkeypatch.setattr(schedule, "SHARE", 1e-6)


def train(
    log_dir: Path, *, spike: int | None = None, **options: Any
) -> tuple[tuple[Alert, ...], list[int]]:
    """Return the alerts and the steps whose gradient norms are in the event file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with HookLogger(model, log_dir, images=False, **options) as logger:
        for number in range(600):
            x = torch.randn(64, 4)
            y = x.sum(1, keepdim=True) * (300 if number == spike else 1)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            logger.log(loss=loss)
            optimizer.step()
    return logger.alerts, sorted({*read(log_dir).layers["step"].tolist()})


@pytest.mark.slow
def test_a_healthy_run_has_norms_of_some_steps_and_each_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "telemetry"):
        alerts, steps = train(tmp_path)
    assert alerts == ()
    assert steps[:FIRST] == [*range(FIRST)]
    later = [number for number in steps if number >= FIRST]
    assert len(later) < 344 / 2  # with those after unusual ones
    assert {300, 400, 500} <= {*later}  # full steps
    table = read(tmp_path).scalars
    assert table[table.tag == "loss"].step.tolist() == [*range(600)]
    assert {*table[table.tag == "telemetry/norms_every_n_steps"].value} == {64}
    [line] = [message for message in caplog.messages if "norms_every_n_steps" in message]
    assert "max_overhead=math.inf" in line


@pytest.mark.slow
def test_a_loss_spike_is_found_at_its_step_and_the_next_64_are_measured(tmp_path: Path) -> None:
    rules = {"weight_jump": None}  # depending on when the next full step comes, it speaks first
    alerts, steps = train(tmp_path, spike=507, alerts=rules)
    assert {*range(507, 571)} <= {*steps}
    started = {(alert.kind, alert.step) for alert in alerts if alert.stage == "started"}
    assert ("loss_spike", 507) in started


class EachStep(Detector):
    """Custom detector that stores the number of each step."""

    kind = "each_step"

    def set_up(self) -> None:
        self.steps: list[int] = []

    def find(self, record: StepRecord, baseline: Any) -> Finding | None:
        self.steps.append(record.step)
        return None


@pytest.mark.slow
def test_custom_rules_and_detectors_receive_every_step(tmp_path: Path) -> None:
    recorder, detector = Recorder(), EachStep()
    train(tmp_path / "rule", alerts=[recorder])
    train(tmp_path / "detector", alerts={"each_step": detector})
    assert [record.step for record in recorder.records] == detector.steps == [*range(600)]


@pytest.mark.slow
def test_without_rules_no_step_is_unusual_and_an_infinite_share_measures_each(
    tmp_path: Path,
) -> None:
    _, steps = train(tmp_path / "limited", alerts=())
    assert len(steps) < FIRST + 60
    _, steps = train(tmp_path / "unlimited", alerts=(), max_overhead=math.inf)
    assert steps == [*range(600)]

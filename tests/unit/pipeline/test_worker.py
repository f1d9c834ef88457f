"""Rules and callbacks on the background thread: slow, hanging, exiting ones lose no step."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

import telemetry
from telemetry import Alert, HookLogger, Rule, StepRecord
from tests.helpers.figures import figures
from tests.helpers.known_runs import alert_at
from tests.helpers.twins import Blocked, Recorder

WATCHDOG_S = 120


def train(model: nn.Module, steps: int, logger: HookLogger | None = None) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().mean().backward()
        if logger is not None:
            logger.log(loss=1.0, accuracy=step / 10)
        optimizer.step()


def test_the_record_of_a_step_has_the_scalars_logged_for_it(tmp_path: Path) -> None:
    model, recorder = nn.Linear(3, 2), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder]) as logger:
        train(model, 2, logger)
        train(model, 1)
    expected = [{"loss": 1.0, "accuracy": 0.0}, {"loss": 1.0, "accuracy": 0.1}, {}]
    assert [record.scalars for record in recorder.records] == expected


class Planted(Rule):
    """Rule that alerts about losses above 1, and exits at a given step."""

    def __init__(self, exits_at: str = "") -> None:
        self.exits_at = exits_at

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if self.exits_at == "step":
            yield alert_at(record.step, None)
            sys.exit(1)

    def on_loss(self, step: int, loss: float) -> Iterable[Alert]:
        if loss > 1 or self.exits_at == "loss":
            yield alert_at(step, None)
        if self.exits_at == "loss":
            sys.exit(1)


def test_a_rule_receives_losses_that_no_step_follows(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    with HookLogger(model, tmp_path, alerts=[Planted()]) as logger:
        train(model, 3, logger)
        logger.log(loss=2.0)
    assert [alert.step for alert in logger.alerts] == [3]


@pytest.mark.parametrize("place", ["loss", "step"])
def test_a_rule_or_callback_that_exits_does_not_end_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    reported: list[int] = []

    def callback(alert: Alert) -> None:
        reported.append(alert.step)
        sys.exit(1)

    model, recorder = nn.Linear(3, 2), Recorder()
    rules = [Planted(exits_at=place), recorder]
    with HookLogger(model, tmp_path, alerts=rules, on_alert=callback) as logger:
        train(model, 3, logger)
    assert [record.step for record in recorder.records] == reported == [0, 1, 2]
    assert telemetry.read(tmp_path).scalars.query("tag == 'loss'").step.tolist() == [0, 1, 2]
    for doing in ("to call on_alert", "to apply the rule"):
        assert caplog.text.count(doing) == 1


def test_steps_queued_after_a_rule_that_hangs_are_counted_after_the_timeout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, blocked = nn.Linear(3, 2), Blocked()
    logger = HookLogger(model, tmp_path, alerts=[blocked])
    train(model, 5)
    assert blocked.entered.wait(WATCHDOG_S)
    logger.close(timeout_s=0.01)
    [message] = [text for text in caplog.messages if "not judged" in text]
    assert figures(message)[0] == 5
    blocked.may_judge.set()


def test_two_loggers_whose_callbacks_flush_each_other_do_not_deadlock(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    met, done = threading.Barrier(2), threading.Barrier(3)
    loggers: list[HookLogger] = []

    def flush_both(alert: Alert) -> None:
        met.wait(WATCHDOG_S)
        for logger in loggers:
            logger.flush()
        done.wait(WATCHDOG_S)

    models = {name: nn.Linear(3, 2) for name in "ab"}
    for name, model in models.items():
        rules = [lambda record: [alert_at(record.step, None)]]
        loggers.append(HookLogger(model, tmp_path / name, alerts=rules, on_alert=flush_both))
    for model in models.values():
        train(model, 1)
    done.wait(WATCHDOG_S)
    for logger in loggers:
        logger.close()
        assert [alert.step for alert in logger.alerts] == [0]
    assert "not judged" not in caplog.text  # no flush has timed out

"""Steps 0, n, 2n, ... are full, and those that rules request, as far as max_overhead allows."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Iterable
from functools import partial
from operator import sub
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import telemetry
from telemetry import Alert, HookLogger, Rule, StepRecord
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.known_runs import alert_at
from tests.helpers.loops import batches, measured_steps, small_cnn
from tests.helpers.shell import lines
from tests.helpers.twins import Blocked, Recorder, assert_left_alone, descend, run


class Requests(Rule):
    """Rule that requests full steps, by default after each step, and alerts at some steps.

    ``follows``: whether it still requests one after a full step, so that it found a candidate.
    """

    requests_full_step = False

    def __init__(
        self, *alerts: int, at: Container[int] = range(10**6), follows: bool = False
    ) -> None:
        self.alerts, self.at, self.follows = alerts, at, follows

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.requests_full_step = record.step in self.at and (self.follows or not record.full)
        found = alert_at(record.step, None, kind="planted", severity="note")
        return [found] if record.step in self.alerts else ()


class Still(torch.optim.SGD):
    """Optimizer that moves nothing, so that a gradient of NaN stays in its step."""

    def step(self, closure: Any = None) -> None: ...


def full_steps(
    *rules: Rule,
    steps: int,
    every: int = 100,
    bad_grads: Container[int] = (),
    bad_losses: Container[int] = (),
) -> list[int]:
    model = nn.Linear(2, 1)
    optimizer = Still(model.parameters())
    with capture_run(model, every_n_steps=every, rules=rules) as captured:
        for step in range(steps):
            optimizer.zero_grad()
            loss = model(torch.ones(1, 2)).sum() * (math.nan if step in bad_grads else 1)
            loss.backward()
            captured.log(loss=math.nan if step in bad_losses else 1.0)
            optimizer.step()
    return [record.step for record in captured.records if record.full]


@pytest.mark.parametrize("every", [1, 2, 3, 100])
def test_every_nth_step_is_full_from_step_0(every: int) -> None:
    assert full_steps(steps=7, every=every) == [*range(0, 7, every)]


def test_requests_that_confirm_nothing_are_few_and_come_later_and_later() -> None:
    full = full_steps(Requests(), Requests(), steps=1300)
    assert [step for step in full if step % 100] == [3, 23, 63, 303, 703, 1103]


def test_a_requested_full_step_follows_two_steps_later() -> None:
    assert full_steps(Requests(at={20}), steps=30) == [0, 22]


class Chain(Requests):
    """Rule that needs consecutive full steps."""

    full_steps_needed = 3


def test_two_requests_after_the_requested_full_step_are_granted_too() -> None:
    assert full_steps(Requests(follows=True), steps=20) == [0, 2, 4, 6]
    assert full_steps(Chain(follows=True), steps=20) == [0, 2, 4, 5, 7, 8]


def test_an_alert_restores_the_allowance() -> None:
    assert full_steps(Requests(20), steps=40) == [0, 3, 22]


@pytest.mark.parametrize("place", ["bad_grads", "bad_losses"])
def test_a_new_nan_restores_the_allowance_and_a_persistent_one_does_not(place: str) -> None:
    bad: dict[str, Any] = {place: {20, 21, 22, 23, 40}}
    assert full_steps(Requests(), steps=50, **bad) == [0, 3, 22, 42]


def train(model: nn.Module, steps: int, after: Callable[[], object]) -> None:
    optimizer = Still(model.parameters())
    for _ in range(steps):
        descend(model, torch.ones(1, 2), optimizer)
        after()


def test_full_steps_are_counted_as_scheduled_or_requested_and_restored(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with HookLogger(model, tmp_path / "a", every_n_steps=10, alerts=[Requests()]) as logger:
        train(model, 20, after=logger.flush)
        state = logger.state_dict()
    with HookLogger(model, tmp_path / "b", every_n_steps=10, alerts=[]) as logger:
        logger.load_state_dict(state)
        train(model, 1, after=logger.flush)
    for name, scheduled in (("a", 2), ("b", 3)):
        counts = curves(tmp_path / name)
        assert counts["full_steps/scheduled"][-1][1] == scheduled
        assert counts["full_steps/requested"][-1][1] == 1


@pytest.mark.parametrize(
    ("rules", "every_n_steps", "level", "counts"),
    [
        ([], 10, logging.INFO, (2, 0)),
        ([Requests(follows=True)], 5, logging.INFO, (3, 3)),
        ([Requests(follows=True)], 10, logging.WARNING, (2, 3)),
        ([Requests(follows=True)], 100, logging.INFO, (1, 3)),
    ],
)
def test_closing_logs_the_numbers_of_scheduled_and_requested_full_steps(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    rules: list[Rule],
    every_n_steps: int,
    level: int,
    counts: tuple[int, int],
) -> None:
    caplog.set_level(logging.INFO)
    model = small_cnn()
    logger = HookLogger(model, tmp_path, every_n_steps=every_n_steps, alerts=rules)
    for _ in batches(model, logger, steps=11):
        logger.flush()
    logger.close()
    [message] = [line for line in caplog.records if "full steps" in line.getMessage()]
    assert isinstance(message.args, tuple)
    assert (message.levelno, message.args[:2]) == (level, counts)
    assert len(measured_steps(tmp_path)) == sum(counts)
    assert figures(lines("summary", tmp_path)[1]) == [*counts]


def test_requests_of_slow_rules_are_granted_as_soon_as_they_return(tmp_path: Path) -> None:
    model, slow, recorder = nn.Linear(2, 1), Blocked(), Recorder()
    rules = [slow, recorder, Requests(at={1, 2})]
    with HookLogger(model, tmp_path, every_n_steps=1000, alerts=rules) as logger:
        train(model, 10, after=lambda: None)
        slow.may_judge.set()
        logger.flush()
        train(model, 5, after=lambda: None)
    # Step 10 is decided when step 9 ends.
    assert [record.step for record in recorder.records if record.full] == [0, 11]


STEPS = 300


LOOP = partial(batches, steps=STEPS)


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(6)))


def curves(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    table = telemetry.read(log_dir).scalars
    return {t: [*zip(g.step, g.value, strict=True)] for t, g in table.groupby("tag")}


def test_a_limit_that_nothing_fits_leaves_one_full_step_and_norms_of_one_step_in_64(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"every_n_steps": 10, "max_overhead": 1e-9}
    outcome = assert_left_alone(deep, LOOP, tmp_path, **limits)
    assert [record.step for record in outcome.full] == [0]
    steps = [record.step for record in outcome.records]
    assert {*map(sub, steps[3:], steps[2:])} == {64}
    found = curves(tmp_path)
    assert [step for step, _ in found["loss"]] == [*range(STEPS)]
    assert found["telemetry/every_n_steps"] == [(0, 10.0)]
    assert found["telemetry/norms_every_n_steps"] == [(0, 1.0)]
    # Each limit is reported once, with the curve that shows it.
    messages = [message for message in caplog.messages if "max_overhead=1e-09" in message]
    assert sorted(message.rsplit(" ", 1)[1] for message in messages) == [
        "telemetry/every_n_steps",
        "telemetry/norms_every_n_steps",
    ]


@pytest.mark.parametrize("limit", [{}, {"max_overhead": math.inf}])
def test_without_a_limit_no_full_step_is_postponed_and_no_overhead_is_written(
    tmp_path: Path, limit: dict[str, Any]
) -> None:
    outcome = run(deep, LOOP, tmp_path, every_n_steps=10, **limit)
    assert [record.step for record in outcome.full] == [*range(0, STEPS, 10)]
    assert [record.step for record in outcome.records] == [*range(STEPS)]
    assert not [tag for tag in curves(tmp_path) if "overhead" in tag or "every_n" in tag]

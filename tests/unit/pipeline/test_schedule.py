"""Steps 0, n, 2n, ... are full steps, and so are requested ones within the allowance."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable

import numpy as np
import pytest

from telemetry import Alert, Rule, StepRecord
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps
from telemetry.pipeline.schedule import Judge
from telemetry.records import Layout, Module, Parameter


@pytest.mark.parametrize(
    ("n", "steps"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (100, [0]), (2, [0, 2, 4, 6])]
)
def test_every_nth_step_is_due_from_step_0(n: int, steps: list[int]) -> None:
    is_full = FullSteps(n)
    assert [step for step in range(7) if is_full(step)] == steps


@pytest.mark.parametrize("n", [0, -1])
def test_an_interval_below_one_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=rf"HookLogger\(every_n_steps={n}\): must be at least 1"):
        FullSteps(n)


@pytest.mark.parametrize("n", [True, 2.0, "100", None])
def test_an_interval_of_another_type_than_int_is_refused(n: object) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(every_n_steps=.*\): must be an int"):
        FullSteps(n)  # type: ignore[arg-type]


class Requests(Rule):
    """Rule that requests a full step after each step, and reports an alert at some."""

    requests_full_step = True

    def __init__(self, *alerts: int) -> None:
        self.alerts = alerts

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        found = Alert(
            kind="planted",
            severity="note",
            step=record.step,
            module_name=None,
            value=0.0,
            threshold=0.0,
            summary="Planted.",
        )
        return [found] if record.step in self.alerts else ()


LAYOUT = Layout(
    modules=(Module(name="fc", type_name="Linear"),),
    parameters=(Parameter(name="fc.weight", module_name="fc", shape=(4, 4)),),
)


def full_steps(
    *rules: Rule, steps: int, n: int = 100, bad: Container[int] = (), of_loss: bool = False
) -> tuple[FullSteps, list[int]]:
    """Return the full steps that were not due in a run of ``steps`` steps."""
    full_steps, judge = FullSteps(n), Judge(rules, Failures())
    found, full = [], full_steps(0)
    for step in range(steps):
        found += [step] if full and step % n else []
        next_full = full_steps(step + 1)  # decided before the rules judge the step
        is_bad = step in bad
        record = StepRecord(
            step=step,
            wall_time=0.0,
            layout=LAYOUT,
            full=full,
            grad_norms=np.ones(1),
            grad_present=np.ones(1, bool),
            grad_finite=np.array([of_loss or not is_bad]),
            scalars={"loss": math.nan if is_bad else 1.0} if of_loss else {},
        )
        list(judge.judge(record))
        if full_steps.grants(judge, step):
            full_steps.request()
        full = next_full
    return full_steps, found


@pytest.mark.parametrize(("steps", "count"), [(50, 3), (400, 4), (2000, 8)])
def test_requests_that_confirm_nothing_add_three_full_steps_and_a_quarter_of_the_due_ones(
    steps: int, count: int
) -> None:
    assert len(full_steps(Requests(), Requests(), steps=steps)[1]) == count


def test_an_alert_restores_the_allowance() -> None:
    assert full_steps(Requests(20), steps=50)[1] == [2, 3, 4, 22, 23, 24]


@pytest.mark.parametrize("of_loss", [False, True])
def test_a_new_nan_restores_the_allowance_and_a_persistent_one_does_not(of_loss: bool) -> None:
    found = full_steps(Requests(), steps=50, bad={20, 21, 22, 23, 40}, of_loss=of_loss)[1]
    assert found == [2, 3, 4, 22, 23, 24, 42, 43, 44]


def test_full_steps_are_counted_as_scheduled_or_requested_and_restored() -> None:
    counted, found = full_steps(Requests(), steps=200)
    assert (counted.scheduled, counted.requested) == (2, len(found))
    resumed = FullSteps(100)
    resumed.load_state_dict({"full_steps": counted.state_dict()}, 200)
    assert (resumed.scheduled, resumed.requested) == (2, len(found))

"""How a run goes: its loss against its past, its gradient norm, jumps of either."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from telemetry.alerts.course import Course, LossTrend
from telemetry.alerts.history import NormTrend
from telemetry.records import Layout, Module, Parameter, StepRecord

LAYOUT = Layout(
    modules=(Module(name="fc", type_name="Linear"),),
    parameters=(Parameter(name="fc.weight", module_name="fc", shape=(4, 4)),),
)


def record(
    step: int, *, norm: float = 1.0, rate: float = 0.1, ratio: float | None = None
) -> StepRecord:
    return StepRecord(
        step=step,
        wall_time=0.0,
        layout=LAYOUT,
        grad_norms=np.array([norm]),
        grad_present=np.array([True]),
        grad_finite=np.array([True]),
        learning_rates=(rate,),
        update_ratios={} if ratio is None else {"fc.weight": ratio},
    )


def loss_after(losses: Iterable[float]) -> LossTrend:
    trend = LossTrend()
    for loss in losses:
        trend.add(loss)
    return trend


def norm_after(norms: Iterable[float]) -> NormTrend:
    trend = NormTrend()
    for norm in norms:
        trend.add(norm)
    return trend


def noise(level: float, count: int) -> list[float]:
    return [level + 0.1 * (-1) ** i for i in range(count)]


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
def test_a_loss_that_rose_is_worse_in_any_unit(unit: float, offset: float) -> None:
    past, now = noise(1.0, 40), noise(3.0, 5)
    trend = loss_after(unit * (loss + offset) for loss in past + now)
    assert trend.is_worse
    assert not trend.is_recovering
    assert trend.steps_far_above == 5


def test_a_loss_that_falls_is_better() -> None:
    assert loss_after(noise(1.0, 40) + noise(0.5, 5)).is_better


def test_a_loss_that_comes_back_is_recovering() -> None:
    trend = loss_after([*noise(1.0, 40), *noise(3.0, 5), *noise(2.5, 5)])
    assert trend.is_worse
    assert trend.is_recovering


def test_noise_is_neither_worse_nor_far_above() -> None:
    trend = loss_after(noise(1.0, 80))
    assert not trend.is_worse
    assert trend.steps_far_above == 0


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_a_loss_that_rises_step_by_step_does_not_raise_its_own_limit(
    unit: float, offset: float
) -> None:
    trend, most = LossTrend(), 0
    for loss in [*noise(1.0, 80), *(1 + 0.01 * step for step in range(80))]:
        trend.add(unit * (loss + offset))
        most = max(most, trend.steps_far_above)
    assert most >= 20


def test_half_of_what_was_learned_is_lost_however_slowly() -> None:
    learns, creeps = [5 - 0.04 * step for step in range(100)], [1 + 0.002 * s for s in range(1100)]
    lost = [loss_after(learns + creeps[:steps]).has_lost for steps in (500, 950, 1100)]
    assert lost == [False, False, True]
    assert not loss_after([*learns, 9.0, 9.0, *noise(1.0, 20)]).has_lost


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_norm_is_compared_with_its_own_highest(unit: float) -> None:
    trend = norm_after([*(unit * n for n in noise(1.0, 60)), 1100 * unit])
    assert trend.above == pytest.approx(3)
    assert trend.far_above == pytest.approx(3)
    assert trend.usual == pytest.approx(unit, rel=0.2)
    assert trend.since_jump == 0


def test_what_explodes_does_not_become_usual_at_once() -> None:
    assert norm_after([*noise(1.0, 60), *[100.0] * 40]).above > 1.9
    assert norm_after([*noise(1.0, 60), *[100.0] * 70]).above < 0.1


def test_gradients_lead_if_the_learning_rate_stays() -> None:
    course = Course()
    for step in range(30):
        course.follow(record(step, ratio=0.01))
    course.follow(record(30, norm=50.0, ratio=0.5))
    assert course.gradients_led
    assert course.since_large_step == 0


def test_gradients_do_not_lead_if_the_learning_rate_jumped() -> None:
    course = Course()
    for step in range(30):
        course.follow(record(step, ratio=0.01))
    course.follow(record(30, rate=1.0, ratio=0.1))
    course.follow(record(31, rate=1.0, norm=50.0, ratio=5.0))
    assert course.since_rate_jump == 1
    assert not course.gradients_led


def test_a_step_counts_once_for_several_rules() -> None:
    course = Course()
    for step in range(3):
        same = record(step)
        course.follow(same)
        course.follow(same)
    assert course.age == 2

"""Baselines of a run: its loss, gradient norms and learning rate, and their jumps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.alerts.baseline import Baseline, LayerNorms, Norm
from telemetry.alerts.state import restore, to_plain
from telemetry.alerts.window import LATEST, LENGTH, Loss, Window
from telemetry.layers.onset import NORMAL_CONSISTENT
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


def loss_after(losses: Iterable[float]) -> Loss:
    trend = Loss()
    for step, loss in enumerate(losses):
        trend.add(step, loss)
    return trend


def norm_after(norms: Iterable[float]) -> Norm:
    trend = Norm()
    for norm in norms:
        trend.add(norm, steps=1)
    return trend


def noise(level: float, count: int) -> list[float]:
    return [level + 0.1 * (-1) ** i for i in range(count)]


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
def test_a_loss_that_rose_is_worse_in_any_unit(unit: float, offset: float) -> None:
    past, now = noise(1.0, 40), noise(3.0, 5)
    trend = loss_after(unit * (loss + offset) for loss in past + now)
    assert trend.is_worse
    assert len(trend.high) == 5


def test_a_loss_that_fell_is_better() -> None:
    assert loss_after(noise(1.0, 40) + noise(0.5, 5)).is_better


def test_noise_is_neither_worse_nor_far_above() -> None:
    trend = loss_after(noise(1.0, 80))
    assert not trend.is_worse
    assert len(trend.high) == 0


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_a_loss_that_rises_step_by_step_does_not_raise_its_own_limit(
    unit: float, offset: float
) -> None:
    trend, most = Loss(), 0
    losses = [*noise(1.0, 80), *(1 + 0.01 * step for step in range(80))]
    for step, loss in enumerate(losses):
        trend.add(step, unit * (loss + offset))
        most = max(most, len(trend.high))
    assert most >= 20


def test_a_slow_rise_counts_after_half_the_progress_is_lost() -> None:
    learns, creeps = [5 - 0.04 * step for step in range(100)], [1 + 0.002 * s for s in range(1100)]
    lost = [loss_after(learns + creeps[:steps]).losses_lost for steps in (500, 950, 1100)]
    assert lost[:2] == [0, 0]
    assert lost[2] > 5
    assert loss_after([*learns, 9.0, 9.0, *noise(1.0, 20)]).losses_lost == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_loss_that_is_noise_from_the_start_loses_no_progress(seed: int) -> None:
    noisy = np.random.default_rng(seed).normal(1.0, 0.125, 600).tolist()
    trend, most = Loss(), 0
    for step, loss in enumerate(noisy):
        trend.add(step, loss)
        most = max(most, trend.losses_lost if step >= LENGTH else 0)
    assert most < LATEST
    learns = [5 - 0.04 * step for step in range(100)]
    assert loss_after([*learns, *noisy[:200], *(loss + 3 for loss in noisy[:20])]).losses_lost > 15


@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
def test_a_norm_is_compared_with_its_highest_value(unit: float) -> None:
    trend = norm_after([*(unit * n for n in noise(1.0, 60)), 1100 * unit])
    assert trend.above_all == pytest.approx(3)
    assert trend.above_window == pytest.approx(3)
    assert trend.usual == pytest.approx(unit, rel=0.2)
    assert trend.since_jump == 0


def test_exploded_norms_enter_the_baseline_only_after_the_latest_steps() -> None:
    assert norm_after([*noise(1.0, 60), *[100.0] * LATEST]).above_all > 1.9
    assert norm_after([*noise(1.0, 60), *[100.0] * (LATEST + 2)]).above_all < 0.1


def test_gradients_lead_if_the_learning_rate_stays() -> None:
    baseline = Baseline()
    for step in range(30):
        baseline.add(record(step, ratio=0.01))
    baseline.add(record(30, norm=50.0, ratio=0.5))
    assert baseline.gradients_led
    assert baseline.since_large_step == 0


def test_gradients_do_not_lead_if_the_learning_rate_jumped() -> None:
    baseline = Baseline()
    for step in range(30):
        baseline.add(record(step, ratio=0.01))
    baseline.add(record(30, rate=1.0, ratio=0.1))
    baseline.add(record(31, rate=1.0, norm=50.0, ratio=5.0))
    assert baseline.since_rate_jump == 1
    assert not baseline.gradients_led


def test_a_return_to_an_earlier_high_rate_is_not_a_jump() -> None:
    baseline = Baseline()
    for step in range(30):
        baseline.add(record(step, rate=0.9 if 10 <= step < 15 else 0.1))
        if step == 10:
            assert baseline.since_rate_jump == 0
            assert (baseline.rate_before_jump, baseline.rate_after_jump) == (0.1, 0.9)
    baseline.add(record(30, rate=0.9))
    assert baseline.since_rate_jump == 20


FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


@pytest.mark.slow
@given(st.lists(FINITE | st.sampled_from([0.0, 1.0, 2.0]), min_size=1, max_size=200))
def test_the_baseline_excludes_the_latest_values(values: list[float]) -> None:
    past = Window()
    for value in values:
        past.add(value)
    kept = values[-LENGTH - LATEST :]
    old = kept[: len(kept) - min(LATEST, len(kept) // 2)]
    assert past.values == old
    assert past.extremes_of_all[1] == max(kept)
    usual, deviation = past.of_latest(len(old))
    assert usual == past.usual == sorted(old)[len(old) // 2]
    off = sorted(abs(value - usual) for value in old)
    assert deviation == NORMAL_CONSISTENT * off[len(off) // 2]


@pytest.mark.parametrize("count", [1, LATEST])
def test_the_baseline_excludes_unusual_values_until_they_persist(count: int) -> None:
    past = Window()
    for value in [1.0] * 50:
        past.add(value)
    for _ in range(count):
        past.add(9.0, unusual=True)
    assert past.extremes_of_all[1] == 1.0
    past.add(9.0, unusual=True)
    assert past.extremes_of_all[1] == (9.0 if count == LATEST else 1.0)


def layers_after(rows: Iterable[Iterable[float]]) -> LayerNorms:
    layers = LayerNorms()
    layout = Layout(
        modules=tuple(Module(name=name, type_name="Linear") for name in "ab"),
        parameters=tuple(Parameter(name=n, module_name=n, shape=(4, 4)) for n in "ab"),
    )
    for step, norms in enumerate(rows):
        values = np.array([*norms])
        layers.add(replace(record(step), layout=layout, grad_norms=values))
    return layers


@pytest.mark.parametrize(
    ("usual", "now", "steps", "unusual"),
    [
        ((1.0, 1.0), (1.0, 1.0), 3, False),
        ((1.0, 1.0), (1.0, 30.0), 3, True),
        ((1.0, 1.0), (1.0, 30.0), 2, False),
        ((1.0, 1.0), (0.01, 1.0), 3, True),
        ((1.0, 1.0), (0.01, 0.02), 3, False),  # both alike
        ((1.0, 1.0), (0.001, 0.1), 3, True),
        ((1.0, 1.0), (0.0, 1.0), 1, True),
        ((1.0, 1.0), (0.0, 0.01), 1, True),
        ((1.0, 0.0), (1.0, 1.0), 3, False),
    ],
)
def test_a_layer_is_unusual_if_zero_or_for_three_steps_tenfold_beyond_all(
    usual: tuple[float, float], now: tuple[float, float], steps: int, unusual: bool
) -> None:
    assert not layers_after([usual] * 60).are_unusual
    assert layers_after([*[usual] * 60, *[now] * steps]).are_unusual == unusual


def test_a_baseline_continues_from_its_state() -> None:
    uninterrupted, first, second = Baseline(), Baseline(), Baseline()
    steps = [record(step, norm=1 + step % 3, ratio=0.01) for step in range(60)]
    for step in steps[:40]:
        first.add(step)
    restore(second, json.loads(json.dumps(to_plain(first))))
    for step in steps:
        uninterrupted.add(step)
    for step in steps[40:]:
        second.add(step)
    assert json.dumps(to_plain(second)) == json.dumps(to_plain(uninterrupted))

"""Baselines of a run: its loss, gradient norms and learning rate, and their jumps."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from telemetry import Baseline, StepRecord
from tests.helpers.scripted import record

units = pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])


def after(records: Iterable[StepRecord]) -> Baseline:
    baseline = Baseline()
    for each in records:
        baseline.add(each)
    return baseline


def losses(values: Iterable[float]) -> list[StepRecord]:
    return [record(step, scalars={"loss": loss}) for step, loss in enumerate(values)]


def norms(values: Iterable[float]) -> list[StepRecord]:
    return [record(step, norms=[norm]) for step, norm in enumerate(values)]


def noise(level: float, count: int) -> list[float]:
    return [level + 0.1 * (-1) ** i for i in range(count)]


# --- the loss ------------------------------------------------------------------------------------


@units
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
def test_a_loss_that_rose_is_worse_in_any_unit(unit: float, offset: float) -> None:
    loss = after(losses(unit * (x + offset) for x in noise(1.0, 40) + noise(3.0, 5))).loss
    assert loss.is_worse
    assert len(loss.high) == 5
    usual, better = (after(losses(noise(1.0, 40) + noise(x, 5))).loss for x in (1.0, 0.5))
    assert (usual.is_worse, len(usual.high), usual.is_better) == (False, 0, False)
    assert better.is_better


@units
@pytest.mark.parametrize("offset", [-5.0, 5.0])
def test_a_loss_that_rises_step_by_step_does_not_raise_its_own_limit(
    unit: float, offset: float
) -> None:
    baseline, most = Baseline(), 0
    for each in losses(
        unit * (x + offset) for x in [*noise(1.0, 80), *(1 + 0.01 * step for step in range(80))]
    ):
        baseline.add(each)
        most = max(most, len(baseline.loss.high))
    assert most >= 20


@units
@pytest.mark.parametrize("offset", [-5.0, 0.0, 5.0])
def test_the_distance_of_a_loss_counts_ranges_above_the_highest(unit: float, offset: float) -> None:
    window = after(losses(unit * (x + offset) for x in noise(1.0, 40))).loss.window
    assert window.ranges_above(unit * (offset + 2.1)) == pytest.approx(5)
    assert window.ranges_above(unit * (offset + 1.0)) == pytest.approx(-0.5)


LEARNS = [5 - 0.04 * step for step in range(100)]


def test_a_slow_rise_counts_after_half_the_progress_is_lost() -> None:
    creeps = [1 + 0.002 * step for step in range(1100)]
    lost = [after(losses(LEARNS + creeps[:n])).loss.losses_lost for n in (500, 950, 1100)]
    assert lost[:2] == [0, 0]
    assert lost[2] > 5
    assert after(losses([*LEARNS, 9.0, 9.0, *noise(1.0, 20)])).loss.losses_lost == 0


@pytest.mark.parametrize("seed", range(8))
def test_a_loss_that_is_noise_from_the_start_loses_no_progress(seed: int) -> None:
    noisy = np.random.default_rng(seed).normal(1.0, 0.125, 600).tolist()
    baseline, most = Baseline(), 0
    for each in losses(noisy):
        baseline.add(each)
        most = max(most, baseline.loss.losses_lost if each.step >= 100 else 0)
    assert most < 20
    rises = [*LEARNS, *noisy[:200], *(loss + 3 for loss in noisy[:20])]
    assert after(losses(rises)).loss.losses_lost > 15


# --- gradient norms and learning rates -----------------------------------------------------------


@units
def test_a_norm_is_compared_with_its_highest_value(unit: float) -> None:
    norm = after(norms([*(unit * n for n in noise(1.0, 60)), 1100 * unit])).norm
    assert (norm.above_all, norm.above_window) == pytest.approx((3, 3))
    assert norm.usual == pytest.approx(unit, rel=0.2)
    assert norm.jump_step == 60


def test_exploded_norms_enter_the_baseline_only_after_the_latest_steps() -> None:
    assert after(norms([*noise(1.0, 60), *[100.0] * 20])).norm.above_all > 1.9
    assert after(norms([*noise(1.0, 60), *[100.0] * 22])).norm.above_all < 0.1


def at_rate(
    step: int, rate: float = 0.1, norm: float = 1.0, ratio: float | None = None
) -> StepRecord:
    ratios = {} if ratio is None else {"0.weight": ratio}
    return record(step, norms=[norm], learning_rates=(rate,), update_ratios=ratios)


def test_gradients_lead_only_if_the_learning_rate_stays() -> None:
    usual = [at_rate(step, ratio=0.01) for step in range(30)]
    baseline = after([*usual, at_rate(30, norm=50.0, ratio=0.5)])
    assert baseline.gradients_led
    assert baseline.large_step == 30
    jumps = [at_rate(30, 1.0, ratio=0.1), at_rate(31, 1.0, norm=50.0, ratio=5.0)]
    baseline = after([*usual, *jumps])
    assert baseline.since_rate_jump == 1
    assert not baseline.gradients_led


def test_a_return_to_an_earlier_high_rate_is_not_a_jump() -> None:
    rates = [0.9 if 10 <= step < 15 or step == 30 else 0.1 for step in range(31)]
    records = [at_rate(step, rate) for step, rate in enumerate(rates)]
    jumped = after(records[:11])
    assert jumped.since_rate_jump == 0
    assert (jumped.rate_before_jump, jumped.rate_after_jump) == (0.1, 0.9)
    assert after(records).since_rate_jump == 20


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
    rows = [*[usual] * 60, *[now] * steps]
    records = [record(step, norms=norms) for step, norms in enumerate(rows)]
    assert not after(records[:60]).layers.are_unusual
    assert after(records).layers.are_unusual == unusual

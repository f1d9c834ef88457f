"""Losses that diverge or stay, gradients that are lost or never zeroed, rates that end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from telemetry import Alert
from telemetry.testing import alerts_of, capture_run
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.scripted import record
from tests.helpers.small_runs import Batch, EndsWith, MakeOptimizer, draw, net, train

every_interval = pytest.mark.parametrize("every", [1, 10, 100])


def clip(limit: float) -> Callable[[nn.Module], object]:
    return lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit)


# --- gradients at the step are compared with those after backward --------------------------------


@pytest.mark.slow
@every_interval
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_step_are_reported(every: int, to_none: bool) -> None:
    [alert] = train(
        rule("no_learning"), 80, every=every,
        after_backward=lambda model: model.zero_grad(set_to_none=to_none),
    )  # fmt: skip
    assert (alert.value, figures(alert.cause)[1:]) == (0, [0])
    assert "zero_grad() before backward()" in alert.advice[0]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "every"), [(1e-7, 1), (1e-7, 10), (1e-7, 100), (0.1, 10)])
def test_only_clipping_to_almost_zero_is_reported(limit: float, every: int) -> None:
    alerts = train(rule("no_learning"), 80, after_backward=clip(limit), every=every)
    assert [limit in figures(alert.cause) for alert in alerts] == [True] * (limit < 0.1)


@every_interval
def test_the_layer_that_passes_no_gradient_on_is_named(every: int) -> None:
    model = net()
    model.append(nn.ReLU())
    nn.init.constant_(model[-2].bias, -100.0)  # so that no output is above 0
    [alert] = train(rule("no_learning"), 80, model=model, every=every)
    assert (alert.module_name, alert.value) == (str(len(model) - 1), 0)


def test_a_run_that_measures_no_weights_requests_no_full_step_for_them() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = Adam(model.parameters())
    with capture_run(model, every_n_steps=20, measure=("activations", "gradients")) as run:
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(16, 4)).square().mean().backward()
            optimizer.step()
    assert [record.step for record in run.records if record.full] == [0, 20, 40]


# --- the learning rate ---------------------------------------------------------------------------


def test_a_schedule_that_ends_too_early_is_noted_once() -> None:
    [alert] = train(
        rule("learning_rate_zero"), 90, rate=lambda step: max(0.0, 0.1 * (1 - step / 40))
    )
    assert (alert.severity, alert.step) == ("warning", 59)
    assert {40, 0.1} <= {*figures(alert.summary)}


def test_a_schedule_of_epochs_that_is_advanced_at_each_step_is_noted() -> None:
    [alert] = train(rule("learning_rate_zero"), 100, rate=lambda step: 0.1 * 0.8**step)
    assert 1e-8 < alert.threshold < 1e-6


@pytest.mark.parametrize(
    "rate",
    [
        lambda step: 0.1 * step / 50,  # warm-up from 0
        lambda step: 0.1 * (1 - step / 59),  # down to 0 at the end
        lambda step: 0.1 if step < 30 else 1e-5,
    ],
)
def test_usual_schedules_are_not_noted(rate: Callable[[int], float]) -> None:
    assert train(rule("learning_rate_zero"), 60, rate=rate) == []


# --- a loss that stays ---------------------------------------------------------------------------


def random_targets(step: int) -> Batch:
    return draw()[0], torch.randint(3, (32,))


@pytest.mark.slow
@pytest.mark.parametrize("are_restored", [False, True])
def test_targets_of_other_inputs_and_restored_weights_are_noted_once(are_restored: bool) -> None:
    model = net()
    kept = copy.deepcopy(model.state_dict())
    [alert] = train(
        rule("loss_stuck"), 300, model=model, optimizer=partial(SGD, lr=0.01),
        batch=random_targets, before=lambda step: are_restored and model.load_state_dict(kept),
    )  # fmt: skip
    assert (alert.severity, alert.stage, alert.step) == ("note", "started", 200)
    assert are_restored or 3 in figures(alert.summary)  # ln 3
    assert ("writes the old weights back" in (alert.cause or "")) == are_restored


@pytest.mark.slow
def test_a_loss_that_stays_names_inputs_that_are_far_from_standardized() -> None:
    def nearly_constant(step: int) -> Batch:
        inputs, targets = random_targets(step)
        return 0.006 * inputs - 2, targets

    optimizer = partial(SGD, lr=0.01)
    [alert] = train(rule("loss_stuck"), 300, optimizer=optimizer, batch=nearly_constant)
    assert [round(number, 2) for number in figures(alert.cause)] == [2, 0.01]  # without signs
    assert "Standardize" in alert.advice[0]


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "steps"), [(0.1, 500), (1e-9, 300)])
def test_neither_a_run_that_learns_nor_weights_that_hardly_move_are_stuck(
    rate: float, steps: int
) -> None:
    assert train(rule("loss_stuck"), steps, rate=lambda step: rate) == []


@pytest.mark.slow
def test_outputs_that_are_the_same_for_all_batches_are_noted() -> None:
    factors = [1.0]

    def close(step: int) -> None:
        factors[0] = float(step < 120)

    gate = EndsWith(lambda x: factors[0] * x)
    [alert] = train(rule("loss_stuck"), 400, model=net().append(gate), before=close)
    assert alert.step == 300
    assert "batches differ" in alert.summary


# --- a loss that diverges ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("ramp", "every"), [(20, 1), (20, 100), (60, 10), (60, 100)])
def test_a_learning_rate_that_rose_is_named_once_and_not_resolved(ramp: int, every: int) -> None:
    [alert] = train(
        rule("loss_divergence"), 400, optimizer=Adam, every=every,
        rate=lambda step: 3e-3 * 300 ** min(1.0, max(0.0, (step - 202) / ramp)),
    )  # fmt: skip
    assert 203 <= alert.step <= 203 + ramp + 20
    assert 0.003 in figures(alert.cause)


@pytest.mark.parametrize("others", [0, 5])
def test_three_high_losses_in_a_row_diverge_only_where_single_ones_are_rare(others: int) -> None:
    high = {*range(7, 7 + 4 * others, 4), 32, 33, 34}
    records = [
        record(
            step,
            scalars={"loss": 9.0 if step in high else 1 + step % 3 / 10},
            update_ratios={"0.weight": 0.5},
        )
        for step in range(36)
    ]
    alerts = alerts_of(records, [rule("loss_divergence")])
    assert [alert.step for alert in alerts] == ([] if others else [34])


def test_rates_of_optimizers_that_step_in_turn_have_not_risen() -> None:
    alerts = train(
        rule("loss_divergence"), 60, every=1, rate=lambda step: 20.0 if step % 2 else 1.0
    )
    assert alerts
    assert not any("rose" in (alert.cause or "") for alert in alerts)


@every_interval
def test_a_rate_that_is_far_too_high_from_the_first_step_is_named(every: int) -> None:
    first, *_ = train(rule("loss_divergence"), 40, optimizer=partial(Adam, lr=1.0), every=every)
    assert first.step <= 4
    assert figures(first.cause) == [1]


@every_interval
def test_inputs_that_are_not_standardized_are_the_cause_of_a_divergence(every: int) -> None:
    def pixels(step: int) -> Batch:
        points, classes = draw()
        return 1000 * points + 5000, classes

    model = nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 3))
    first, *_ = train(rule("loss_divergence"), 40, model=model, batch=pixels, every=every)
    assert first.step <= 4
    assert 4900 < figures(first.cause)[0] < 5300
    assert "Standardize" in first.advice[0]


def without_zeroing(optimizer: MakeOptimizer, **how: Any) -> list[Alert]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU()
    how = {"zeroes": lambda step: False, "model": nn.Sequential(*layers, nn.Linear(16, 3)), **how}
    return train(rule("loss_divergence"), 160, optimizer=optimizer, **how)


@pytest.mark.slow
@every_interval
@pytest.mark.parametrize("optimizer", [Adam, partial(SGD, lr=0.01, momentum=0.9)])
def test_gradients_that_are_never_zeroed_are_named_early(
    optimizer: MakeOptimizer, every: int
) -> None:
    [alert] = without_zeroing(optimizer, every=every)
    assert alert.step <= 120
    assert "zero_grad()" in alert.advice[0]


@pytest.mark.slow
def test_unzeroed_gradients_are_found_with_clipping_and_accumulation() -> None:
    clipped: dict[str, Any] = {"micro_batches": 2, "after_backward": clip(0.5)}
    sgd = partial(SGD, lr=0.05)
    [alert] = without_zeroing(sgd, **clipped)
    assert "zero_grad()" in alert.advice[0]
    assert without_zeroing(sgd, zeroes=lambda step: True, **clipped) == []
    begin, end = without_zeroing(sgd, zeroes=lambda step: step >= 60)
    assert (begin.stage, end.stage) == ("started", "resolved")
    assert end.step >= 60


@pytest.mark.parametrize("every", [10, 100])
@pytest.mark.parametrize(("optimizer", "rate"), [(Adam, 0.3), (SGD, 2.0)])
def test_unzeroed_gradients_replace_the_learning_rate_as_the_cause_once_they_are_proved(
    optimizer: MakeOptimizer, rate: float, every: int
) -> None:
    of_rate, of_sums = without_zeroing(partial(optimizer, lr=rate), every=every)
    assert (of_rate.stage, of_sums.stage) == ("started", "escalated")
    assert figures(of_rate.cause) == [rate]
    assert "zero_grad()" in of_sums.advice[0]
    assert of_rate.step < of_sums.step <= 30

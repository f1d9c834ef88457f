"""Runs that do not learn: zeroed gradients, a rate that ends, a loss that stays."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from telemetry import Alert
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import Batch, draw, net, train

# --- gradients at the step are compared with those after backward --------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_that_are_zeroed_before_the_step_are_reported(every: int, to_none: bool) -> None:
    model = net()
    zero = lambda: model.zero_grad(set_to_none=to_none)  # noqa: E731
    [alert] = train(rule("no_learning"), 80, model=model, after_backward=zero, every=every)
    assert (alert.value, figures(alert.cause)[1:]) == (0, [0])
    assert "zero_grad() before backward()" in alert.advice[0]


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "every"), [(1e-7, 1), (1e-7, 10), (1e-7, 100), (0.1, 10)])
def test_only_clipping_to_almost_zero_is_reported(limit: float, every: int) -> None:
    model = net()
    clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), limit)  # noqa: E731
    alerts = train(rule("no_learning"), 80, model=model, after_backward=clip, every=every)
    assert [limit in figures(alert.cause) for alert in alerts] == [True] * (limit < 0.1)


# --- the learning rate ---------------------------------------------------------------------------


def with_schedule(rate: Callable[[int], float], steps: int) -> list[Alert]:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)

    def set_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = rate(step)

    detector = rule("learning_rate_zero")
    return train(detector, steps, model=model, optimizer=optimizer, before=set_rate)


def test_a_schedule_that_ends_too_early_is_noted_once() -> None:
    [alert] = with_schedule(lambda step: max(0.0, 0.1 * (1 - step / 40)), 90)
    assert (alert.severity, alert.step) == ("note", 59)
    assert {40, 0.1} <= {*figures(alert.summary)}


def test_a_schedule_of_epochs_that_is_advanced_at_each_step_is_noted() -> None:
    [alert] = with_schedule(lambda step: 0.1 * 0.8**step, 100)
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
    assert with_schedule(rate, 60) == []


# --- a loss that stays ---------------------------------------------------------------------------


def random_targets(step: int) -> Batch:
    return draw()[0], torch.randint(3, (32,))


@pytest.mark.slow
@pytest.mark.parametrize("are_restored", [False, True])
def test_targets_of_other_inputs_and_restored_weights_are_noted_once(are_restored: bool) -> None:
    model = net()
    kept = copy.deepcopy(model.state_dict())
    [alert] = train(
        rule("loss_stuck"), 300, model=model, optimizer=SGD(model.parameters(), 0.01),
        batch=random_targets, before=lambda step: are_restored and model.load_state_dict(kept),
    )  # fmt: skip
    assert (alert.severity, alert.stage, alert.step) == ("note", "started", 200)
    assert are_restored or 3 in figures(alert.summary)  # ln 3
    assert ("writes the old weights back" in (alert.cause or "")) == are_restored


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "steps"), [(0.1, 500), (1e-9, 300)])
def test_neither_a_run_that_learns_nor_weights_that_hardly_move_are_stuck(
    rate: float, steps: int
) -> None:
    model = net()
    optimizer = SGD(model.parameters(), rate, 0.9)
    assert train(rule("loss_stuck"), steps, model=model, optimizer=optimizer) == []


class Gate(nn.Module):
    """A gate that closes, so that all outputs are the same."""

    is_open = True

    def forward(self, x: Tensor) -> Tensor:
        return x if self.is_open else 0 * x


@pytest.mark.slow
def test_outputs_that_are_the_same_for_all_batches_are_noted() -> None:
    gate = Gate()

    def close(step: int) -> None:
        gate.is_open = step < 120

    [alert] = train(rule("loss_stuck"), 400, model=net().append(gate), before=close)
    assert alert.step == 300
    assert "batches differ" in alert.summary

"""Rules about weights: jumps, layers that stand still, exponential trends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from telemetry import Alert, StepRecord
from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import (
    at_step,
    captured,
    classify,
    draw,
    mlp,
    net,
    rate_of,
    toward,
    train,
)

Change = Callable[[nn.Sequential, Optimizer], object]


def changed(change: Change, *, at: int = 94, every: int = 10) -> list[Alert]:
    """Train with one change before step ``at``; the run learns slowly by then."""
    model = net()
    captured(model, 100)
    optimizer = SGD(model.parameters(), 1e-3)
    before = at_step(at, lambda: change(model, optimizer))
    settings = {"model": model, "optimizer": optimizer, "before": before}
    return train(rule("weight_jump"), 120, every=every, **settings)


def times(factor: float, *layers: int) -> Change:
    return lambda model, _: [model[layer].weight.data.mul_(factor) for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "expected", "before"), [(1, 94, 93), (10, 100, 90)])
@pytest.mark.parametrize(("factor", "severity"), [(5, "warning"), (0.2, "note")])
def test_a_matrix_that_was_overwritten_outside_the_optimizer_is_named(
    every: int, expected: int, before: int, factor: float, severity: str
) -> None:
    (alert,) = changed(times(factor, 3), every=every)
    assert (alert.severity, alert.module_name, alert.step) == (severity, "3", expected)
    assert alert.value == pytest.approx(factor, rel=0.02)
    assert before in figures(alert.summary)


@pytest.mark.slow
def test_a_matrix_that_was_set_to_zero_is_a_note() -> None:
    (alert,) = changed(times(0, 3), at=100)
    assert (alert.severity, alert.module_name, alert.step, alert.value) == ("note", "3", 100, 0)
    assert "0, unlike at step 90" in alert.summary


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "at"),
    [
        (lambda model, optimizer: None, 94),
        (times(2, 3), 94),
        (times(5, 0, 3), 94),
        (lambda model, optimizer: optimizer.param_groups[0].update(lr=20.0), 94),
        (times(5, 3), 25),
    ],
    ids=["nothing", "twice", "all", "a rate that jumps", "no baseline yet"],
)
def test_other_changes_are_not_a_jump(change: Change, at: int) -> None:
    assert changed(change, at=at) == []


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_unfrozen_layers_that_grow_are_not_a_jump(scale: float) -> None:
    model = net()
    captured(model, 100)
    last = model[3].weight
    last.data.mul_(scale)
    last.requires_grad_(False)
    unfreeze = at_step(94, lambda: last.requires_grad_(True))
    settings = {"model": model, "optimizer": SGD(model.parameters(), 0.1), "before": unfreeze}
    assert train(rule("weight_jump"), 120, **settings) == []
    assert last.norm() > 0.1


def by_layer(model: nn.Sequential, *rates: float) -> Adam:
    layers = zip((model[0], model[2], model[4]), rates, strict=True)
    return Adam([{"params": layer.parameters(), "lr": rate} for layer, rate in layers])


def standing(model: nn.Module, optimizer: Optimizer, steps: int, **more: Any) -> list[Alert]:
    return train(rule("layers_not_learning"), steps, model=model, optimizer=optimizer, **more)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_layer_whose_rate_has_vanished_is_named(every: int) -> None:
    model = mlp(8, 32, 32, 3)
    [alert] = standing(model, by_layer(model, 9e-8, 3e-5, 1e-2), 250, every=every)
    assert (alert.severity, alert.module_name) == ("warning", "0")
    assert alert.value < alert.threshold
    assert 100 <= alert.step <= 220


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "is_frozen"),
    [
        ((4e-4, 2e-3, 1e-2), False),  # as for fine-tuning
        ((4e-4, 2e-3, 1e-2), True),
        ((1e-15, 1e-10, 1e-10), False),  # the others stand still, too
    ],
)
def test_layers_with_a_reason_to_be_slower_are_not_reported(
    rates: tuple[float, ...], is_frozen: bool
) -> None:
    model = mlp(8, 32, 32, 3)
    model[0].requires_grad_(not is_frozen)
    assert standing(model, by_layer(model, *rates), 250) == []


@pytest.mark.parametrize("every", [10, 100])
def test_gradients_that_have_become_small_are_the_cause(every: int) -> None:
    model = mlp(8, 32, 32, 3)
    factors = iter([1.0] * 40 + [1e-6] * 270)  # as behind a discriminator that wins
    model[1].register_full_backward_hook(lambda module, grads, _: (grads[0] * next(factors),))
    alert, *_ = standing(model, SGD(model.parameters(), 0.1), 310, every=every)
    assert alert.module_name == "0"
    assert max(figures(alert.cause)) > 1000
    assert "learning rate" not in (alert.cause or "")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "resolves"), [(1.5e-6, False), (4e-6, True), (1e-2, True)])
def test_the_alert_resolves_when_the_layer_moves_again_and_not_near_the_limit(
    rate: float, resolves: bool
) -> None:
    model = mlp(8, 32, 32, 3)
    optimizer = by_layer(model, 9e-8, 3e-5, 1e-2)
    raise_rate = rate_of(optimizer, lambda step: rate if step >= 200 else 9e-8)
    alerts = standing(model, optimizer, 300, before=raise_rate)
    assert [alert.stage for alert in alerts] == ["started", *["resolved"] * resolves]
    assert all(200 < alert.step <= 240 for alert in alerts[1:])


Optimizers = Callable[[nn.Module], Optimizer]


def trends(
    steps: int,
    optimizer_of: Optimizers,
    loss_of: Callable[[nn.Module], Tensor] = classify,
    every: int = 10,
) -> list[Alert]:
    model = net()
    settings = {"optimizer": optimizer_of(model), "loss_of": lambda step: loss_of(model)}
    return captured(model, steps, rules=["exponential_trend"], every=every, **settings).alerts


def guess(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,)))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 50])
def test_weights_that_decay_too_fast_are_reported_while_half_is_left(every: int) -> None:
    (alert,) = trends(150, lambda m: AdamW(m.parameters(), weight_decay=20.0), guess, every)
    assert figures(alert.summary)[0] == pytest.approx(0.02, rel=0.1)  # rate times decay
    assert alert.threshold == 0.5
    assert 0.05 < alert.value < 0.5
    assert trends(400, lambda m: Adam(m.parameters()), guess, every) == []


def of_larger_weights(model: nn.Module) -> Optimizer:
    for parameter in model.parameters():
        parameter.data.mul_(10)
    return AdamW(model.parameters(), 1e-2, weight_decay=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer_of", "unit"),
    [
        (of_larger_weights, None),  # they shrink while the model learns
        # Adam moves them evenly towards large targets.
        (lambda m: Adam(m.parameters(), 1e-2), 1e5),
        (lambda m: Adam(m.parameters(), 3e-2), 3e4),
        (lambda m: Adam(m.parameters(), 2e-2), 1e6),
    ],
)
def test_weights_that_change_as_the_model_learns_are_not_reported(
    optimizer_of: Optimizers, unit: float | None
) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        return toward(model, lambda x: unit * x[:, :3])(0) if unit else classify(model)

    assert trends(300, optimizer_of, loss_of) == []


def test_weights_that_grow_by_a_decay_of_the_wrong_sign_are_reported() -> None:
    def grows(model: nn.Module) -> Optimizer:
        return SGD([{"params": model.parameters(), "weight_decay": -3.0}], 1e-2)

    alert, *_ = trends(150, grows)
    assert figures(alert.summary)[0] == pytest.approx(0.03, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("discount", [0.9, 1.1])
def test_a_self_reinforcing_loss_is_reported(discount: float) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        points, _ = draw()
        return F.mse_loss(model(points), 1 + discount * model(points).detach())

    alerts = trends(300, lambda m: SGD(m.parameters(), 0.01), loss_of)
    assert bool(alerts) == (discount > 1)
    assert any("The loss grows by" in alert.summary for alert in alerts) == (discount > 1)


@pytest.mark.parametrize("norms_every", [1, 2])
@pytest.mark.parametrize(("highest", "is_reported"), [(1.75e-3, False), (1.0, True)])
def test_a_loss_that_returns_from_far_below_its_floor_is_no_trend(
    highest: float, is_reported: bool, norms_every: int
) -> None:
    [record] = captured(net(), 1, rules=[]).records
    rises = 2e-6 * 1.035 ** np.arange(500)
    losses = [0.05] * 20 + [2e-6] * 20 + [*rises[rises < highest]]
    chosen, records = Random(0), list[StepRecord]()
    for step, loss in enumerate(losses):
        if chosen.randrange(norms_every) == 0 or step < 20:
            norms = loss**0.5 * np.ones_like(record.grad_norms)
            scalars = {"loss": loss}
            light = replace(record, step=step, full=False, scalars=scalars, grad_norms=norms)
            records.append(light)
    alerts = alerts_of(records, [rule("exponential_trend")])
    assert bool(alerts) == is_reported
    for alert in alerts:
        assert figures(alert.summary)[0] == pytest.approx(0.035, rel=0.1)


@pytest.mark.parametrize(
    ("factor", "first", "is_reported"), [(1.25, 1e-2, True), (0.8, 0.3, False), (1.25, 1e-5, False)]
)
def test_a_rate_that_grows_exponentially_is_reported_when_steps_are_large(
    factor: float, first: float, is_reported: bool
) -> None:
    model = net()
    optimizer, highest = Adam(model.parameters(), first), 1e-3 + 10 * first
    schedule = rate_of(optimizer, lambda step: min(first * factor ** (step // 10), highest))
    settings = {"model": model, "optimizer": optimizer, "before": schedule}
    alerts = train(rule("exponential_trend"), 150, **settings)
    assert bool(alerts) == is_reported
    for alert in alerts:
        assert {1.25, 0.01} <= {*figures(alert.summary)}
        assert alert.step < 100

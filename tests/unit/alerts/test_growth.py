"""Explosions, their origin, and growth that is harmless."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from telemetry.alerts.exploding import ExplodingActivation, ExplodingGradient
from telemetry.alerts.growth import _common_growth
from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.records import StepRecord
from telemetry.testing import alerts_of, capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import Batch, draw, net, train


def deep(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.ReLU())]
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 3))


def test_outputs_that_are_equal_for_every_input_do_not_explode() -> None:
    model = deep(2)

    def kill(step: int) -> None:
        if step == 45:
            model[2].bias.data.fill_(-400.0)
            model[4].bias.data.fill_(9.0)

    assert train(ExplodingActivation(), 80, model=model, before=kill) == []


@pytest.mark.parametrize(
    ("which", "module", "named"),
    [([10], "10", [10]), (range(2, 18, 2), "2", [2, 18])],
)
def test_the_cause_names_the_layer_or_the_range_of_layers_that_grew(
    which: list[int], module: str, named: list[float]
) -> None:
    model = deep()

    def grow(step: int) -> None:
        for index in which if step == 40 else ():
            model[index].weight.data.mul_(3e4 ** (1 / len(which)))

    alert = train(ExplodingGradient(), 45, model=model, before=grow)[0]
    assert alert.module_name == module
    assert figures(alert.cause) == named


def test_the_only_layer_whose_gradient_grows_is_named() -> None:
    model = deep()
    model[10].weight.register_hook(lambda grad: grad * (1e6 if scaled else 1))
    scaled: list[int] = []

    def begin(step: int) -> None:
        scaled.extend([step] if step == 40 else [])

    alert = train(ExplodingGradient(), 45, model=model, before=begin)[0]
    assert (alert.step, alert.module_name) == (40, "10")
    assert 10 in figures(alert.cause)


@pytest.mark.slow
def test_gradients_of_a_loss_that_falls_without_bound_explode() -> None:
    model = net()
    optimizer = Adam(model.parameters(), 0.01)
    with capture_run(model, every_n_steps=10, rules=[ExplodingGradient()]) as run:
        for step in range(160):
            points, classes = draw()
            error = (model(points)[:, 0] - classes).square().mean()
            loss = error if step < 60 else -error
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    alert = run.alerts[0]
    assert 80 <= alert.step <= 140
    assert "while the loss falls without bound" in alert.summary


@pytest.mark.parametrize("grows", [True, False])
def test_gradients_that_another_one_exceeds_vanish_only_if_they_shrank(grows: bool) -> None:
    model = deep()
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, every_n_steps=1, rules=[]) as run:
        for _ in range(2):
            nn.functional.cross_entropy(model(draw()[0]), draw()[1]).backward()
            optimizer.step()
    last = run.records[1]
    names = [parameter.name for parameter in last.layout.parameters]
    one = np.array([name == "18.weight" for name in names])

    def record(step: int) -> StepRecord:
        unlike = step >= 40
        factors = np.where(one, 1e5 if grows else 1.0, 1.0 if grows else 1e-5) if unlike else 1.0
        moved = {n: 1e-3 if n == "18.weight" or not unlike else 1e-8 for n in names}
        norms = last.grad_norms * factors
        return replace(last, step=step, grad_norms=norms, update_ratios=moved)

    alerts = alerts_of(map(record, range(60)), [VanishingGradient()])
    assert [alert.module_name for alert in alerts] == ([] if grows else ["0"])


def test_the_grown_layer_is_named_though_the_next_batch_has_almost_no_gradient() -> None:
    model = deep()

    def grow(step: int) -> None:
        if step == 42:
            model[10].weight.data.mul_(3e4)

    weight = lambda step: 1e-9 if step == 42 else 1.0  # noqa: E731
    alert = train(ExplodingGradient(), 48, model=model, before=grow, weight=weight)[0]
    assert alert.module_name == "10"


def test_gradients_stay_exploded_though_some_batches_have_none() -> None:
    model = net()
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, every_n_steps=1000, rules=[]) as run:
        for _ in range(2):
            model(draw()[0]).sum().backward()
            optimizer.step()

    def record(step: int) -> StepRecord:
        size = 1.0 if step < 63 else 100.0 * (step % 4 > 0)
        norms = run.records[1].grad_norms * size
        return replace(run.records[1], step=step, grad_norms=norms, scalars={"loss": size})

    [alert] = alerts_of(map(record, range(100)), [ExplodingGradient()])
    assert 73 <= alert.step <= 83


@pytest.mark.parametrize(
    ("at", "factor"),
    [(40, [1e4]), (43, [])],  # a light step does not measure the batch
)
def test_no_layer_is_named_for_a_batch_in_another_unit(at: int, factor: list[float]) -> None:
    def batch(step: int) -> Batch:
        points, classes = draw()
        return points * (1e4 if step == at else 1.0), classes

    alert = train(ExplodingGradient(), 48, model=deep(), batch=batch)[0]
    assert alert.module_name is None
    assert figures(alert.cause) == factor


def test_growth_from_layer_to_layer_is_not_resolved_while_it_persists() -> None:
    model = deep()
    for index in range(2, 18, 2):
        model[index].weight.data.mul_(12.0)
    alerts = train(ExplodingGradient(), 90, model=model, optimizer=SGD(model.parameters(), 1e-12))
    assert [alert.stage for alert in alerts] == ["started"]
    assert "He or Xavier" in alerts[0].advice[0]


@pytest.mark.parametrize(
    ("grown", "of", "is_explosion"), [(4, 10, False), (5, 10, False), (6, 10, True), (2, 2, False)]
)
def test_most_layers_have_to_grow_tenfold(grown: int, of: int, is_explosion: bool) -> None:
    growth = np.array([1.5] * grown + [0.0] * (of - grown) + [np.nan] * 9)
    baseline = SimpleNamespace(layers=SimpleNamespace(growth=growth))
    assert (_common_growth(baseline) is not None) == is_explosion  # type: ignore[arg-type]

"""Explosions, their origin, and growth that is harmless."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from telemetry import StepRecord
from telemetry.testing import alerts_of
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.scripted import record
from tests.helpers.small_runs import Batch, captured, draw, net, train


def deep(layers: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    hidden = [layer for _ in range(layers) for layer in (nn.Linear(16, 16), nn.ReLU())]
    for layer in hidden[::2]:
        nn.init.kaiming_normal_(layer.weight)  # type: ignore[arg-type]
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), *hidden, nn.Linear(16, 3))


def grow(model: nn.Sequential, layers: Sequence[int], at: int = 40) -> Callable[[int], None]:
    """Return a function that multiplies the weights by 30,000 in all at one step."""

    def before(step: int) -> None:
        for index in layers if step == at else ():
            model[index].weight.data.mul_(3e4 ** (1 / len(layers)))

    return before


def step_of(model: nn.Module) -> StepRecord:
    """Return the full record of the second step."""
    return captured(model, 2, rules=[], every=1).records[1]


# --- activations ---------------------------------------------------------------------------------


def test_outputs_that_are_equal_for_every_input_do_not_explode() -> None:
    model = deep(2)

    def kill(step: int) -> None:
        if step == 45:
            model[2].bias.data.fill_(-400.0)
            model[4].bias.data.fill_(9.0)

    assert train(rule("exploding_activation"), 80, model=model, before=kill) == []


# --- the layers that grew ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("which", "module", "named"), [([10], "10", [10]), (range(2, 18, 2), "2", [2, 14])]
)
def test_the_cause_names_the_layer_or_the_range_of_layers_that_grew(
    which: Sequence[int], module: str, named: list[float]
) -> None:
    model = deep()
    alert = train(rule("exploding_gradient"), 45, model=model, before=grow(model, which))[0]
    assert alert.module_name == module
    assert figures(alert.cause) == named


def test_the_grown_layer_is_named_though_the_next_batch_has_almost_no_gradient() -> None:
    model = deep()
    alert = train(
        rule("exploding_gradient"), 48, model=model, before=grow(model, [10], at=42),
        weight=lambda step: 1e-9 if step == 42 else 1.0,
    )[0]  # fmt: skip
    assert alert.module_name == "10"


def test_the_only_layer_whose_gradient_grows_is_named() -> None:
    model, scaled = deep(), list[int]()
    model[10].weight.register_hook(lambda grad: grad * (1e6 if scaled else 1))

    def begin(step: int) -> None:
        scaled.extend([step] if step == 40 else [])

    alert = train(rule("exploding_gradient"), 45, model=model, before=begin)[0]
    assert (alert.step, alert.module_name) == (40, "10")
    assert 10 in figures(alert.cause)


@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize(("factor", "clipped"), [(1e3, True), (1e3, False), (3, True)])
def test_a_layer_that_explodes_alone_is_named_before_the_norm_of_all_has_grown_so_far(
    every: int, factor: float, clipped: bool
) -> None:
    model, step = deep(), iter(range(100))
    model[10].weight.register_hook(lambda grad: grad * (factor if next(step) >= 60 else 1))
    clip = partial(nn.utils.clip_grad_norm_, [*model.parameters()], 0.1 if clipped else math.inf)
    alerts = train(
        rule("exploding_gradient"), 80, model=model, every=every, optimizer=partial(SGD, lr=1e-4),
        after_backward=lambda model: clip(),
    )  # fmt: skip
    assert [alert.module_name for alert in alerts] == ["10"] * (factor > 3)
    assert all(60 <= alert.step <= 64 for alert in alerts)


def test_single_steps_at_which_a_layer_grows_alone_do_not_add_up() -> None:
    model, step = deep(), iter(range(100))
    model[10].weight.register_hook(lambda grad: grad * (300 if next(step) in (60, 63, 66) else 1))
    settings = {"model": model, "optimizer": partial(SGD, lr=1e-4)}
    assert train(rule("exploding_gradient"), 80, **settings) == []


@pytest.mark.parametrize(
    ("factors", "module"),
    [
        ([1e5] * 4 + [1.0] * 6, "3"),  # where the growth entered the backward pass
        ([1e5] * 5 + [1.0] * 5, "4"),
        ([1e5] * 6 + [1.0] * 4, "5"),
        ([1.0] + [1e5] * 6 + [1.0] * 3, None),
        ([1e5] * 9 + [5.0], "9"),  # only its own weight does not change its gradient
        ([1e5] * 4 + [30.0] * 2 + [1e5] * 4, "4"),  # side by side
        ([1e-5] * 9 + [1e5], "9"),  # the others were clipped
        ([1e5, 1e7], None),
    ],
)
def test_a_majority_of_three_layers_or_more_has_to_grow_tenfold(
    factors: list[float], module: str | None
) -> None:
    frozen = [0.0] * 9
    rows = [[*[1.0] * len(factors), *frozen]] * 40 + [[*factors, *frozen]]
    records = [record(step, norms=norms) for step, norms in enumerate(rows)]
    [alert] = alerts_of(records, [rule("exploding_gradient")])
    assert (alert.step, alert.module_name) == (40, module)


def test_a_layer_that_may_be_on_another_branch_is_named_after_a_full_step() -> None:
    trunk, first, second = deep(4), nn.Linear(3, 3), nn.Linear(3, 3)
    model = nn.ModuleDict({"trunk": trunk, "first": first, "second": second})

    def loss_of(step: int) -> Tensor:
        points, classes = draw()
        features = trunk(points)
        error = nn.functional.cross_entropy(first(features), classes)
        error = error * (1e6 if step >= 43 else 1.0)
        return error + nn.functional.cross_entropy(second(features), classes)

    optimizer = SGD(model.parameters(), 1e-8)
    rules = ["exploding_gradient"]
    run = captured(model, 50, rules=rules, loss_of=loss_of, optimizer=optimizer, every=20)
    [alert] = run.alerts
    assert (alert.step, alert.module_name) == (43, "first")


@pytest.mark.parametrize(
    ("at", "factor"),
    [(40, [1e4]), (43, [])],  # a light step does not measure the batch
)
def test_no_layer_is_named_for_a_batch_in_another_unit(at: int, factor: list[float]) -> None:
    def batch(step: int) -> Batch:
        points, classes = draw()
        return points * (1e4 if step == at else 1.0), classes

    alert = train(rule("exploding_gradient"), 48, model=deep(), batch=batch)[0]
    assert alert.module_name is None
    assert figures(alert.cause) == factor


# --- over time -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_gradients_of_a_loss_that_falls_without_bound_explode() -> None:
    alert = train(
        rule("exploding_gradient"), 160, optimizer=partial(Adam, lr=0.01),
        loss_function=lambda points, classes: (points[:, 0] - classes).square().mean(),
        weight=lambda step: 1.0 if step < 60 else -1.0,
    )[0]  # fmt: skip
    assert 80 <= alert.step <= 140
    assert "while the loss falls without bound" in alert.summary


def test_gradients_stay_exploded_though_some_batches_have_none() -> None:
    last = step_of(net())

    def record(step: int) -> StepRecord:
        size = 1.0 if step < 63 else 100.0 * (step % 4 > 0)
        return replace(last, step=step, grad_norms=last.grad_norms * size, scalars={"loss": size})

    [alert] = alerts_of(map(record, range(100)), [rule("exploding_gradient")])
    assert 73 <= alert.step <= 83


def test_growth_from_layer_to_layer_is_not_resolved_while_it_persists() -> None:
    model = deep()
    for index in range(2, 18, 2):
        model[index].weight.data.mul_(12.0)
    [alert] = train(rule("exploding_gradient"), 90, model=model, rate=lambda step: 1e-12)
    assert alert.stage == "started"
    assert "He or Xavier" in alert.advice[0]


@pytest.mark.parametrize("grows", [True, False])
def test_gradients_that_another_one_exceeds_vanish_only_if_they_shrank(grows: bool) -> None:
    last = step_of(deep())
    names = [parameter.name for parameter in last.layout.parameters]
    one = np.array([name == "18.weight" for name in names])

    def record(step: int) -> StepRecord:
        unlike = step >= 40
        factors = np.where(one, 1e5 if grows else 1.0, 1.0 if grows else 1e-5) if unlike else 1.0
        moved = {n: 1e-3 if n == "18.weight" or not unlike else 1e-8 for n in names}
        norms = last.grad_norms * factors
        return replace(last, step=step, grad_norms=norms, update_ratios=moved)

    alerts = alerts_of(map(record, range(60)), [rule("vanishing_gradient")])
    assert [alert.module_name for alert in alerts] == ([] if grows else ["0"])

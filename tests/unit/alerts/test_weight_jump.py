from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from telemetry import Alert
from telemetry.alerts.weights import WeightJump
from tests.helpers.figures import figures
from tests.helpers.small_runs import net, train


def run(
    change: Callable[[nn.Sequential, Any], None], *, at: int = 94, every: int = 10
) -> list[Alert]:
    """Train with one change before step ``at``; the run learns slowly by then."""
    model = net()
    train(WeightJump(), 100, model=model)
    optimizer = SGD(model.parameters(), 1e-3)

    def before(step: int) -> None:
        if step == at:
            with torch.no_grad():
                change(model, optimizer)

    return train(WeightJump(), 120, model=model, optimizer=optimizer, before=before, every=every)


def times(factor: float, *layers: int) -> Callable[[nn.Sequential, Any], None]:
    def change(model: nn.Sequential, _: Any) -> None:
        for layer in layers:
            model.get_submodule(str(layer)).get_parameter("weight").mul_(factor)

    return change


@pytest.mark.slow
@pytest.mark.parametrize(("every", "expected", "before"), [(1, 94, 93), (10, 100, 90)])
def test_a_matrix_that_was_overwritten_outside_the_optimizer_is_named(
    every: int, expected: int, before: int
) -> None:
    (alert,) = run(times(5, 3), every=every)
    assert (alert.severity, alert.module_name, alert.step) == ("warning", "3", expected)
    assert {5, before} <= {*figures(alert.summary)}


def test_a_matrix_that_is_scaled_down_is_a_note() -> None:
    (alert,) = run(times(0.1, 3))
    assert (alert.severity, alert.module_name) == ("note", "3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        lambda model, optimizer: None,
        times(2, 3),
        times(5, 0, 3),
        lambda model, optimizer: optimizer.param_groups[0].update(lr=20.0),
    ],
    ids=["nothing", "twice", "all", "a rate that jumps"],
)
def test_other_changes_are_not_a_jump(change: Callable[[nn.Sequential, Any], None]) -> None:
    assert run(change) == []


@pytest.mark.slow
def test_weights_that_learn_fast_from_the_start_are_not_a_jump() -> None:
    assert train(WeightJump(), 200, every=10) == []
    assert run(times(5, 3), at=25) == [], "no baseline yet"


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_unfrozen_layers_that_grow_are_not_a_jump(scale: float) -> None:
    model = net()
    train(WeightJump(), 100, model=model)
    last = model.get_submodule("3").get_parameter("weight")
    with torch.no_grad():
        last.mul_(scale)
    last.requires_grad_(False)
    optimizer = SGD(model.parameters(), 0.1)

    def unfreeze(step: int) -> None:
        last.requires_grad_(step >= 94)

    assert train(WeightJump(), 120, model=model, optimizer=optimizer, before=unfreeze) == []
    assert last.norm() > 0.1

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert
from telemetry.alerts.no_learning import UntrainedParameters
from telemetry.testing import capture_run
from tests.helpers.small_runs import draw, train


class Net(nn.Module):
    """A trunk, a used head, and an unused one."""

    def __init__(self, detached: bool = False, spare: bool = False) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.spare = nn.Linear(8, 4) if spare else None
        self.head = nn.Linear(16, 3)
        self.detached = detached

    def forward(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        logits: Tensor = self.head(h.detach() if self.detached else h)
        return logits


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_head_that_was_replaced_after_the_optimizer_was_made_is_reported(every: int) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), 0.1)
    model.head = nn.Linear(16, 3)
    [alert] = train(UntrainedParameters(), 150, model=model, optimizer=optimizer, every=every)
    assert (alert.severity, alert.module_name) == ("warning", "head")
    assert alert.step <= 100
    assert "no optimizer steps it" in alert.summary


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_detached_trunk_is_named_as_one_part(every: int) -> None:
    [alert] = train(UntrainedParameters(), 150, model=Net(detached=True), every=every)
    assert (alert.severity, alert.module_name) == ("warning", "trunk")
    assert "got none in" in alert.summary


def test_a_small_unused_head_is_a_note() -> None:
    [alert] = train(UntrainedParameters(), 150, model=Net(spare=True))
    assert (alert.severity, alert.module_name) == ("note", "spare")


def test_parameters_of_an_optimizer_that_is_never_stepped_are_reported() -> None:
    model = Net()
    SGD(model.head.parameters(), 0.1)  # never stepped
    optimizer = SGD(model.trunk.parameters(), 0.01)
    [alert] = train(UntrainedParameters(), 150, model=model, optimizer=optimizer)
    assert (alert.severity, alert.module_name) == ("warning", "head")


def test_parameters_that_are_frozen_or_trained_by_another_optimizer_are_not_reported() -> None:
    model = Net(spare=True)
    assert model.spare is not None
    model.spare.requires_grad_(False)
    other = SGD(model.trunk.parameters(), 0.01)
    steps: list[Alert] = train(
        UntrainedParameters(),
        150,
        model=model,
        optimizer=SGD(model.head.parameters(), 0.1),
        before=lambda step: other.step() if step % 5 == 4 else None,
    )
    assert steps == []


class Experts(Net):
    """One of three experts transforms the output of the trunk; the last one is never chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        logits: Tensor = self.head(self.experts[self.calls % 2](self.trunk(x)))
        return logits


def test_one_of_several_experts_that_is_never_chosen_is_not_reported() -> None:
    assert train(UntrainedParameters(), 150, model=Experts()) == []


def test_the_first_of_several_equal_layers_are_reported_if_they_run_detached() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            self.head = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                x = layer(x.detach() if i == 2 else x)
            logits: Tensor = self.head(x)
            return logits

    [alert] = train(UntrainedParameters(), 150, model=Stack())
    assert (alert.severity, alert.module_name) == ("warning", "layers.0")
    assert "layers.0, layers.1 (" in alert.summary


def test_a_part_that_is_rarely_trained_is_not_reported() -> None:
    class Rare(Net):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            extra = self.spare(x)[:, :3] if self.calls % 40 == 0 else torch.zeros(3)  # type: ignore[misc]
            return super().forward(x) + extra

    assert train(UntrainedParameters(), 150, model=Rare(spare=True)) == []


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_parameters_that_are_unfrozen_later_and_not_in_the_optimizer_are_reported(
    every: int,
) -> None:
    model = Net()
    model.trunk.requires_grad_(False)

    def unfreeze(step: int) -> None:
        model.trunk.requires_grad_(step >= 130)

    [alert] = train(
        UntrainedParameters(),
        420,
        model=model,
        optimizer=SGD(model.head.parameters(), 0.1),
        before=unfreeze,
        every=every,
    )
    assert (alert.severity, alert.module_name) == ("warning", "trunk")
    assert 200 <= alert.step <= 310


@pytest.mark.slow
def test_parameters_that_an_optimizer_no_longer_steps_are_a_note() -> None:
    model = Net()
    first, second = SGD(model.parameters(), 0.1), SGD(model.head.parameters(), 0.1)
    first_stage: list[Alert] = []
    with capture_run(model, every_n_steps=10, rules=[UntrainedParameters()]) as run:
        for step in range(330):
            points, classes = draw()
            model.zero_grad()
            F.cross_entropy(model(points), classes).backward()
            (first if step < 120 else second).step()
            first_stage += run.alerts if step == 119 else []
    assert first_stage == []
    [alert] = run.alerts
    assert (alert.severity, alert.module_name) == ("note", "trunk")
    assert "no optimizer has stepped it for" in alert.summary

"""Gradients that a step adds to those of the step before, however a loop zeroes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD

from telemetry.testing import capture_run
from tests.helpers.twins import loss_of, mlp


def to_none(model: nn.Module) -> None:
    model.zero_grad()


def in_place(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def behind_autograd(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def never(model: nn.Module) -> None:
    """Leave all gradients."""


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("zero", [to_none, in_place, behind_autograd, never])
def test_only_gradients_that_are_never_zeroed_are_marked(
    zero: Callable[[nn.Module], None], micro_batches: int
) -> None:
    model = mlp()
    optimizer = SGD(model.parameters(), 0.01)
    with capture_run(model, rules=()) as run:
        for _ in range(3):
            zero(model)
            for _ in range(micro_batches):
                loss_of(model).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
    marks = [record.not_zeroed.tolist() for record in run.records]
    added = [False, *[zero is never] * 2]
    assert marks == [[mark] * 4 for mark in added]


@pytest.mark.parametrize("to_none", [True, False])
def test_each_of_two_optimizers_zeroes_its_own_gradients(*, to_none: bool) -> None:
    generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    optimizers = [SGD(part.parameters(), 0.01) for part in (critic, generator)]
    with capture_run(model, rules=(), optimizer=optimizers[1]) as run:
        for _ in range(4):
            for sign, optimizer in zip((-1, 1), optimizers, strict=True):
                optimizer.zero_grad(set_to_none=to_none)
                (sign * critic(generator(torch.randn(4, 2)))).mean().backward()
                optimizer.step()
    assert not any(record.not_zeroed.any() for record in run.records)


def test_gradients_that_are_set_and_not_added_need_no_zeroing() -> None:
    model = mlp()
    parameters = list(model.parameters())
    optimizer = SGD(parameters, 0.01)
    with capture_run(model, rules=()) as run:
        for _ in range(4):
            grads = torch.autograd.grad(loss_of(model), parameters)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            optimizer.step()
    assert not any(record.not_zeroed.any() for record in run.records)

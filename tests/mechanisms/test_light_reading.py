"""Light steps: one native call reads the same as the slow path of full steps, where it can."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from telemetry import StepRecord
from telemetry.capture import Schedule, Step
from telemetry.testing import capture_run
from tests.helpers.require import needs_tensor_reader

pytestmark = needs_tensor_reader

STEPS = 6
Change = Callable[[int, nn.Sequential, Optimizer], object]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that one native call has read."""
    steps: list[int] = []
    read_at_once = Step._read_at_once

    def spy(step: Step, optimizer: Optimizer) -> Any:
        if (is_read := read_at_once(step, optimizer)) and step.step not in steps:
            steps.append(step.step)
        return is_read

    monkeypatch.setattr(Step, "_read_at_once", spy)
    return steps


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 3))


def train(
    before_step: Change,
    make: Callable[[nn.Sequential], Optimizer],
    step: Callable[[Optimizer], Any] = lambda optimizer: optimizer.step(),
    every: int = 100,
) -> list[StepRecord]:
    """Return the records of some steps; the first is a full step."""
    model = net()
    optimizer = make(model)
    inputs = torch.Generator().manual_seed(1)
    with capture_run(model, every_n_steps=every, rules=[]) as run:
        for number in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=inputs)).square().sum().backward()
            before_step(number, model, optimizer)
            step(optimizer)
    return run.records


def nothing(step: int, model: nn.Sequential, optimizer: Optimizer) -> None: ...


def schedule(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)


def freeze(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step >= 3:
        model[0].weight.grad = None


def transpose(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    model[0].weight.grad = model[0].weight.grad.t().contiguous().t()


def stride(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        wide = torch.zeros(*parameter.shape, 2)
        wide[..., 0] = parameter.grad
        parameter.grad = wide[..., 0]


def sparse(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    model[0].weight.grad = model[0].weight.grad.to_sparse()


def tensor_rate(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


def spoil(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step == 3:
        model[0].weight.grad[0, 0] = torch.nan


def unfreeze(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step == 3:
        optimizer.add_param_group({"params": [*model[2].parameters()], "lr": 0.02})


def replace(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step == 3:
        model[0], model[2] = nn.Linear(5, 300), nn.Linear(300, 3)
        model(torch.ones(4, 5)).sum().backward()
        optimizer.param_groups[0]["params"] = [*model.parameters()]


def fail(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    if step == 3:
        optimizer.param_groups[0]["momentum"] = "planted"
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["momentum"] = 0.9


def unscale(step: int, model: nn.Sequential, optimizer: Optimizer) -> None:
    """Have the fused optimizer divide by the factor of a GradScaler at one step."""
    optimizer.grad_scale = torch.tensor(2.0) if step == 3 else None  # type: ignore[attr-defined]


def sgd(model: nn.Sequential, **options: Any) -> Optimizer:
    return SGD(model.parameters(), 0.01, momentum=0.9, **options)


def of_first_layer(model: nn.Sequential) -> Optimizer:
    return SGD(model[0].parameters(), 0.01)


def in_dtype(dtype: torch.dtype) -> Callable[[nn.Sequential], Optimizer]:
    def make(model: nn.Sequential) -> Optimizer:
        model.to(dtype).register_forward_pre_hook(lambda module, args: args[0].to(dtype))
        return sgd(model)

    return make


ALL = [*range(1, STEPS)]


@pytest.mark.parametrize(
    ("change", "make", "steps"),
    [
        (nothing, sgd, ALL),
        (schedule, sgd, ALL),
        (freeze, sgd, ALL),
        (transpose, sgd, ALL),
        (fail, sgd, ALL),
        (nothing, in_dtype(torch.float64), ALL),
        (nothing, in_dtype(torch.bfloat16), ALL),
        (nothing, in_dtype(torch.float16), ALL),
        (unfreeze, of_first_layer, [1, 2]),
        (replace, sgd, [1, 2]),
        (unscale, partial(sgd, fused=True), [1, 2, 4, 5]),
        (spoil, sgd, [1, 2]),
        (stride, sgd, []),
        (sparse, of_first_layer, []),
        (tensor_rate, sgd, []),
    ],
)
def test_one_call_reads_the_same_as_full_steps_and_leaves_the_unusual_to_the_slow_path(
    read: list[int], change: Change, make: Callable[[nn.Sequential], Optimizer], steps: list[int]
) -> None:
    records = train(change, make)
    assert [record.step for record in records] == [0, *ALL]
    assert read[: len(steps)] == steps
    assert steps or not read
    for one, other in zip(records, train(change, make, every=1), strict=True):
        assert one.full == (one.step == 0)
        np.testing.assert_allclose(one.grad_norms, other.grad_norms, rtol=1e-6)
        np.testing.assert_array_equal(one.grad_present, other.grad_present)
        np.testing.assert_array_equal(one.grad_finite, other.grad_finite)
        assert one.learning_rates == other.learning_rates
    assert ("0.weight" in records[4].nonfinite_parameters) == (change is spoil)


@pytest.mark.parametrize("closure", [None, lambda: torch.zeros(())])
def test_a_step_with_a_closure_is_read_too(read: list[int], closure: Any) -> None:
    records = train(nothing, sgd, lambda optimizer: optimizer.step(closure))
    assert (read, len(records)) == (ALL, STEPS)


@pytest.mark.parametrize("plan", ["norms", "skip"])
def test_a_step_whose_optimizer_raised_has_the_norms_of_the_next_try(
    monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Also if the first try is a skipped step, to which an unusual loss then adds norms."""
    plans = {0: "full", 1: "norms", 2: plan}
    monkeypatch.setattr(Schedule, "plan", lambda schedule, step: plans.get(step, "skip"))
    model = net()
    optimizer = sgd(model)
    with capture_run(model, rules=[]) as run:
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(4, 5)).sum().backward()
            if step == 2:
                fail(3, model, optimizer)
                plans[2] = "norms"
                model(torch.ones(4, 5)).sum().backward()
            norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
            optimizer.step()
    assert [record.step for record in run.records] == [0, 1, 2]
    np.testing.assert_allclose(run.records[2].grad_norms, norms, rtol=1e-5)

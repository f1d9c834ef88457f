"""Light steps: one native call reads the same values as the slow path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from telemetry import HookLogger, StepRecord
from telemetry.capture.light_step import LightReader
from telemetry.capture.parameters import ParameterTable
from telemetry.records import Layout
from telemetry.selection import Selection
from telemetry.testing import capture_run
from tests.helpers.require import needs_tensor_reader

STEPS = 6


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that one native call has read."""
    read: list[int] = []
    completed = LightReader.completed

    def spy(self: LightReader, step: int, *rest: Any) -> Any:
        read.append(step)
        return completed(self, step, *rest)

    monkeypatch.setattr(LightReader, "completed", spy)
    return read


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 300), nn.ReLU(), nn.Linear(300, 3))


Change = Callable[[int, nn.Module, torch.optim.Optimizer], None]


def nothing(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


def train(
    model: nn.Module,
    *,
    before_step: Change = nothing,
    optimizer: torch.optim.Optimizer | None = None,
    step: Callable[[torch.optim.Optimizer], Any] = torch.optim.Optimizer.step,
    light: bool = True,
) -> list[StepRecord]:
    """Return the records of some steps; the first is a full step."""
    with pytest.MonkeyPatch.context() as patch:
        if not light:
            patch.setattr(LightReader, "read", lambda self, optimizer, layout: False)
        optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        inputs = torch.Generator().manual_seed(1)
        with capture_run(model, every_n_steps=100, rules=[]) as run:
            for number in range(STEPS):
                optimizer.zero_grad()
                model(torch.randn(4, 5, generator=inputs)).square().sum().backward()
                before_step(number, model, optimizer)
                step(optimizer) if step is not torch.optim.Optimizer.step else optimizer.step()
        return run.records


def assert_same(some: list[StepRecord], others: list[StepRecord]) -> None:
    assert [r.step for r in some] == [r.step for r in others]
    for one, other in zip(some, others, strict=True):
        np.testing.assert_allclose(one.grad_norms, other.grad_norms, rtol=1e-6)
        np.testing.assert_array_equal(one.grad_present, other.grad_present)
        np.testing.assert_array_equal(one.grad_finite, other.grad_finite)
        assert one.learning_rates == other.learning_rates
        assert one.full == other.full
        assert one.nonfinite_parameters == other.nonfinite_parameters


# --- one native call -----------------------------------------------------------------------------


def schedule(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)


def freeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step >= 3:
        next(model.parameters()).grad = None


def transpose(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.grad = parameter.grad.t().contiguous().t()


@needs_tensor_reader
@pytest.mark.parametrize("change", [nothing, schedule, freeze, transpose])
def test_one_call_reads_the_same_as_the_slow_path(change: Change, rows: list[int]) -> None:
    records = train(net(), before_step=change)
    assert rows == list(range(1, STEPS))
    assert_same(records, train(net(), before_step=change, light=False))


@needs_tensor_reader
def test_a_gradient_scale_of_a_fused_optimizer_takes_the_slow_path_at_once() -> None:
    """Scale factor of a GradScaler."""
    model = net()
    model(torch.ones(1, 5)).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, fused=True)
    table = ParameterTable(model, Selection())
    layout = Layout(modules=(), parameters=table.parameters)
    reader = LightReader(table)
    reader.prepare(optimizer, again=False)
    assert reader.read(optimizer, layout)
    reader.completed(0, None)
    optimizer.grad_scale = torch.tensor(1024.0)
    assert not reader.read(optimizer, layout)
    del optimizer.grad_scale
    assert reader.read(optimizer, layout)
    assert reader.completed(1, None).step == 1


@needs_tensor_reader
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_float_dtypes_are_read_by_one_call(dtype: torch.dtype, rows: list[int]) -> None:
    def narrow(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * 0.1).to(dtype)

    class Typed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight = nn.Parameter(torch.randn(5, 40).to(dtype))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs.to(dtype) @ self.weight).float()

    records = train(Typed(), before_step=narrow)
    assert len(rows) == STEPS - 1
    assert_same(records, train(Typed(), before_step=narrow, light=False))


# --- slow path -----------------------------------------------------------------------------------


def stride(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        wide = torch.zeros(*parameter.shape, 2)
        wide[..., 0] = parameter.grad
        parameter.grad = wide[..., 0]


def sparse(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameter = next(model.parameters())
    parameter.grad = parameter.grad.to_sparse()


def tensor_rate(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.01)


@needs_tensor_reader
@pytest.mark.parametrize("change", [stride, sparse, tensor_rate])
def test_unusual_gradients_and_rates_take_the_slow_path(change: Change, rows: list[int]) -> None:
    records = train(net(), before_step=change)
    assert rows == []
    assert_same(records, train(net(), before_step=change, light=False))


def spoil(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        next(model.parameters()).grad[0, 0] = float("nan")


@needs_tensor_reader
def test_nonfinite_norms_take_the_slow_path_which_names_the_parameters(rows: list[int]) -> None:
    records = train(net(), before_step=spoil)
    assert rows == [1, 2]
    assert records[3].grad_finite.tolist() == [False, True, True, True]
    assert records[3].nonfinite_parameters == ()
    assert "0.weight" in records[4].nonfinite_parameters
    assert_same(records, train(net(), before_step=spoil, light=False))


@needs_tensor_reader
def test_a_step_with_a_closure_takes_the_slow_path(rows: list[int]) -> None:
    def with_closure(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step(lambda: torch.zeros(()))

    records = train(net(), step=with_closure)
    assert rows == []
    assert len(records) == STEPS
    train(net(), step=lambda optimizer: optimizer.step(closure=None))
    assert len(rows) == STEPS - 1


@needs_tensor_reader
def test_parameters_added_to_the_optimizer_are_measured_at_once(rows: list[int]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model[0].parameters(), 0.01)

    def unfreeze(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 3:
            optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})

    records = train(model, optimizer=optimizer, before_step=unfreeze)
    assert rows[:2] == [1, 2]
    assert [record.grad_present.sum() for record in records] == [2, 2, 2, 4, 4, 4]
    assert records[-1].learning_rates == (0.01, 0.02)


@needs_tensor_reader
def test_a_step_that_fails_is_not_counted(rows: list[int]) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], 0.01)

    def fail(step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if step == 3:
            optimizer.param_groups[0]["momentum"] = "planted"
            with pytest.raises(TypeError):
                optimizer.step()
            optimizer.param_groups[0]["momentum"] = 0.9
            other.step()

    records = train(model, optimizer=optimizer, before_step=fail)
    assert [record.step for record in records] == list(range(STEPS))
    assert rows == list(range(1, STEPS))


@needs_tensor_reader
def test_torch_modes_of_the_caller_receive_no_extra_calls(tmp_path: Path) -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Functions(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            seen.append(function)
            return function(*args, **(kwargs or {}))

    for mode in (Watching, Functions):
        counts = []
        for watched in (True, False):
            model, seen = net(), []
            optimizer = torch.optim.SGD(model.parameters(), 0.01)

            def steps(model: nn.Module = model, optimizer: Any = optimizer) -> Iterator[None]:
                for _ in range(3):
                    model(torch.ones(4, 5)).sum().backward()
                    yield
                    optimizer.step()

            def run(turns: Iterator[None], mode: Any = mode) -> None:
                next(turns)
                next(turns)
                with mode():
                    next(turns, None)

            if watched:
                with HookLogger(model, tmp_path, every_n_steps=100, alerts=()):
                    run(steps())
            else:
                run(steps())
            counts.append(len(seen))
        assert counts[0] == counts[1]


@needs_tensor_reader
def test_parameters_can_be_swapped_because_no_weak_reference_is_kept(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with capture_run(model, every_n_steps=100, rules=[]):
        for _ in range(3):
            model(torch.ones(4, 5)).sum().backward()
            optimizer.step()
        model.half()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            model.float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

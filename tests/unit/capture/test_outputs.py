"""Outputs of modules: in containers, of functions at the end of a model, units, evaluation mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import StepRecord
from telemetry.testing import capture_run


class Network(nn.Module):
    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(6, 4), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.linear(x))


def record_of(model: nn.Module, x: Tensor | None = None, **options: Any) -> StepRecord:
    torch.manual_seed(0)
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, rules=(), **options) as run:
        result = model(torch.rand(5, 6) if x is None else x)
        (result if isinstance(result, Tensor) else sum(result)).square().sum().backward()
        optimizer.step()
    return run.records[0]


def wrapped(tensor: Tensor, containers: int) -> Any:
    value: Any = tensor
    for _ in range(containers):
        value = [value]
    return value


def in_itself(tensor: Tensor) -> list[Any]:
    value: list[Any] = [tensor]
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("make", "count"),
    [(lambda x: wrapped(x, 8), 1), (lambda x: wrapped(x, 9), 0), (in_itself, 8)],
)
def test_tensors_are_found_up_to_eight_containers_deep(
    make: Callable[[Tensor], Any], count: int
) -> None:
    class Part(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return make(x)

    model = Network(lambda x: (model.part(x), x)[1])
    model.part = Part()
    names = [str(output) for output in record_of(model).outputs]
    assert len([name for name in names if name.startswith("part")]) == count


@pytest.mark.parametrize(
    ("end", "type_name"),
    [
        (lambda x: F.softmax(x, 1), "Softmax"),
        (torch.sigmoid, "Sigmoid"),
        (torch.relu, "ReLU"),
        (torch.tanh, "Tanh"),
    ],
)
def test_the_function_is_recorded_like_its_module(
    end: Callable[[Tensor], Tensor], type_name: str
) -> None:
    model = Network(end)
    result = end(model.linear(x := torch.rand(5, 6))).detach()
    record = record_of(model, x)
    assert [*record.activations] == [*reversed(record.activation_grads)] == ["linear", ""]
    last = record.layout.modules[-1]
    assert (last.name, last.type_name) == ("", type_name)
    assert record.activations[""].sketch.sum == pytest.approx(float(result.sum()))
    assert record.activation_grads[""].sketch.norm == pytest.approx(2 * float(result.norm()))


@pytest.mark.parametrize(
    "end",
    [
        nn.Tanh(),  # a module is recorded once
        nn.Sequential(nn.Tanh(), nn.Flatten()),
        nn.Identity(),
        lambda x: x.sigmoid().log(),
        lambda x: (x.sigmoid(),),
        lambda x: x.view(10, 2),
    ],
)
def test_other_results_are_not_recorded_again(end: Callable[[Tensor], Any]) -> None:
    record = record_of(Network(end))
    assert "" not in record.activations
    assert "" not in [module.name for module in record.layout.modules]


def test_a_selection_of_modules_does_not_include_the_function() -> None:
    assert [*record_of(Network(torch.tanh), modules="linear").activations] == ["linear"]


def test_a_model_with_own_parameters_keeps_its_place_before_its_layers() -> None:
    model = Network(torch.tanh)
    model.shift = nn.Parameter(torch.zeros(4))
    model.end = lambda x: torch.tanh(x + 0 * model.shift)
    assert [module.name for module in record_of(model).layout.modules] == ["", "linear"]


@pytest.mark.usefixtures("process_group")
def test_the_function_of_a_pipeline_stage_is_not_recorded() -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = Network(torch.relu)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), input_args=(torch.rand(5, 6),))
    schedule = ScheduleGPipe(stage, 1, loss_fn=lambda out, target: out.square().sum())
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, rules=()) as run:
        schedule.step(torch.rand(5, 6), target=torch.zeros(5, 4))
        optimizer.step()
    assert [*run.records[0].activations] == ["linear"]


@pytest.mark.parametrize(
    ("first", "shape"),
    [
        (nn.Conv1d(2, 5, 1), (3, 2, 7)),
        (nn.Conv2d(2, 5, 1), (3, 2, 7, 7)),
        (nn.Linear(7, 5), (3, 2, 7)),
    ],
)
def test_an_activation_has_the_units_of_the_layer_before_it(
    first: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(first, nn.ReLU(), nn.Tanh())
    assert record_of(model, torch.rand(shape)).activations.rows.unit_count.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("eval_from", "outputs"), [(3, [3, 3, 3, 0, 3, 3]), (0, [3] * 6), (6, [3] * 6)]
)
def test_a_model_left_in_evaluation_mode_is_measured_from_its_second_step_on(
    eval_from: int, outputs: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.train(eval_from > 0)
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, rules=[]) as run:
        for step in range(6):
            model.train(step < eval_from)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert [record.eval_mode for record in run.records] == [step >= eval_from for step in range(6)]
    assert [len(record.outputs) for record in run.records] == outputs
    assert [len(record.output_grads) for record in run.records] == outputs

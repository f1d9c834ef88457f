"""Functions that a model ends with are recorded like their modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry.capture import forward
from telemetry.records import StepRecord
from telemetry.testing import capture_run
from telemetry.torch_private.ranks import CallingStage


class Network(nn.Module):
    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.end = nn.Linear(6, 4), end

    def forward(self, x: Tensor) -> Any:
        return self.end(self.linear(x))


def record_of(end: Callable[[Tensor], Any], **options: Any) -> StepRecord:
    """Return the record of one step of a network with this end."""
    torch.manual_seed(0)
    model = Network(end)
    optimizer = SGD(model.parameters(), 0.1)
    with capture_run(model, every_n_steps=1, **options) as run:
        result = model(torch.rand(5, 6))
        while not isinstance(result, Tensor):
            (result,) = result
        result.square().sum().backward()
        optimizer.step()
    return run.records[0]


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
    record = record_of(end)
    assert [*record.activations] == [*reversed(record.activation_grads)] == ["linear", ""]
    last = record.layout.modules[-1]
    assert (last.name, last.type_name) == ("", type_name)
    torch.manual_seed(0)
    linear = nn.Linear(6, 4)
    result = end(linear(torch.rand(5, 6))).detach()
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
    record = record_of(end)
    assert "" not in record.activations
    assert "" not in [module.name for module in record.layout.modules]


def test_a_selection_of_modules_does_not_include_the_function() -> None:
    assert [*record_of(torch.tanh, modules="linear").activations] == ["linear"]


def test_the_function_of_a_pipeline_stage_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "calling_stage", lambda: CallingStage(1, False))
    assert [*record_of(torch.relu).activations] == ["linear"]


def test_a_model_with_own_parameters_keeps_its_place_before_its_layers() -> None:
    model = Network(torch.tanh)
    model.shift = nn.Parameter(torch.zeros(4))
    with capture_run(model, every_n_steps=1) as run:
        (model(torch.rand(5, 6)) + model.shift).square().sum().backward()
        SGD(model.parameters(), 0.1).step()
    assert [module.name for module in run.records[0].layout.modules] == ["", "linear"]

"""Tools that trace or transform a model are not disturbed while it is watched."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.twins import (
    Recorder,
    assert_left_alone,
    assert_same,
    batch,
    descend,
    loss_of,
    mlp,
    one_step,
    training,
)


def per_sample_gradients(model: nn.Module) -> Any:
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x[None],)).square().mean()

    gradients = vmap(grad(loss), in_dims=(None, 0))(parameters, torch.ones(3, 4))
    return lambda x: gradients["0.weight"].sum(0)


INPUTS = torch.ones(6, 4)
TOOLS: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda model: torch.jit.trace(model, INPUTS),
    "export": lambda model: torch.export.export(model, (INPUTS,), strict=False).module(),
    "strict export": lambda model: torch.export.export(model, (INPUTS,), strict=True).module(),
    "fx": torch.fx.symbolic_trace,
    "make_fx": lambda model: make_fx(model)(INPUTS),
    "per-sample gradients": per_sample_gradients,
}


@functools.cache
def a_model_with_a_hook_is_exported_strictly() -> bool:
    class Net(nn.Module):  # PyTorch 2.4 exports its own modules with hooks, and no other ones
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    model = Net()
    model.register_forward_hook(lambda module, args, output: None)
    try:
        TOOLS["strict export"](model)
    except Exception:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOLS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_watched_model_can_be_traced(tmp_path: Path, name: str) -> None:
    if name == "strict export" and not a_model_with_a_hook_is_exported_strictly():
        pytest.skip("this PyTorch exports no model that has any hook, strictly")

    def loss(model: nn.Module) -> Tensor:
        result = TOOLS[name](model)
        graphs.append(str(getattr(result, "graph", "")))
        with torch.no_grad():  # what fx returns runs the same layers
            results.append(result(torch.ones(6, 4)))
        return loss_of(model)

    graphs: list[str] = []
    results: list[Tensor] = []
    outcome = assert_left_alone(mlp, training(loss), tmp_path)
    for bare, watched in zip(results[:3], results[3:], strict=True):
        assert_same(bare, watched)
    assert [record.step for record in outcome.full] == [0, 1, 2]
    for record in outcome.full:
        assert record.activation_grads["2"].calls == 1
        assert record.activations["0"].calls == (2 if name == "make_fx" else 1)
    assert not any("telemetry" in graph for graph in graphs)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_user_hook_still_prevents_scripting_of_a_module(tmp_path: Path) -> None:
    model = mlp()
    model[0].register_forward_hook(lambda module, args, output: None)
    with HookLogger(model, tmp_path), pytest.raises((RuntimeError, AttributeError, ValueError)):
        torch.jit.script(model)


@pytest.mark.parametrize("where", [FakeTensorMode, lambda: torch.device("meta")])
def test_a_model_without_values_has_nothing_to_measure_and_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: Callable[[], Any]
) -> None:
    """Fake tensors are for estimating memory before a run."""
    recorder = Recorder()
    with where():
        model = mlp()
        with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
            assert len([*training()(model, None)]) == 3
    assert [record.step for record in recorder.records] == [0, 1, 2]
    for record in recorder.records:
        assert not record.activations
        assert not record.weights
    assert "telemetry failed" not in caplog.text
    assert caplog.text.count("have no values to measure") == 1


def test_a_meta_model_is_logged_once_it_has_values() -> None:
    with torch.device("meta"):
        model = mlp()
    with capture_run(model) as run:
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        descend(model, batch())
    [record] = run.records
    assert record.grad_present.all()
    assert record.activation_grads["2"].calls == 1


def test_lazy_modules_are_logged_with_the_shapes_of_their_first_call() -> None:
    def make() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # lazy modules warn that they are under development
            return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))

    record = one_step(make(), batch())
    assert [p.shape for p in record.layout.parameters] == [(6, 4), (6,), (2, 6), (2,)]
    assert record.weights["0.weight"].sketch.count == 24
    assert record.activations["2"].sketch.count == 12


def test_a_default_device_does_not_change_where_tensors_are_measured() -> None:
    """The default device is a mode, and would send our own tensors to that device."""
    model, x = mlp(), batch()
    with torch.device("meta"):
        record = one_step(model, x)
    assert record.activations["0"].sketch.count == 36
    assert len(record.update_ratios) == 4


def test_training_with_deterministic_algorithms_and_anomaly_detection_is_left_alone(
    tmp_path: Path,
) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autograd.detect_anomaly():
                yield from training()(model, logger)
        finally:
            torch.use_deterministic_algorithms(False)

    with pytest.warns(UserWarning, match="Anomaly"):
        outcome = assert_left_alone(mlp, loop, tmp_path)
    assert outcome.full[1].activation_grads["0"].calls == 1

"""Clipping, zeroing and scaling of gradients, as they arrive."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from twins import Recorder

from telemetry import HookLogger
from telemetry.interventions import (
    Intervention,
    clip_gradients,
    prune_activations,
    scale_gradients,
    zero_gradients,
)


class Net(nn.Module):
    """Two layers that share the weight of a third."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
        self.fc1 = nn.Linear(3, 3)
        self.fc2 = nn.Linear(3, 3)
        self.fc2.weight = self.fc1.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(self.encoder(x)).relu_())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def grads_after(model: nn.Module, passes: int = 1) -> dict[str, Tensor]:
    """Gradients of the same backward pass, done so many times."""
    torch.manual_seed(1)
    x = torch.randn(5, 3)
    model.zero_grad()
    for _ in range(passes):
        (100 * model(x).square().sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_each_tensor_is_clipped_to_its_own_norm() -> None:
    plain = grads_after(net())
    limit = sorted(g.norm().item() for g in plain.values())[3]
    model = net()
    with clip_gradients(model, max_norm=limit):
        clipped = grads_after(model)
    for name, grad in plain.items():
        expected = nn.Parameter(torch.zeros_like(grad))
        expected.grad = grad.clone()
        torch.nn.utils.clip_grad_norm_([expected], limit)
        torch.testing.assert_close(clipped[name], expected.grad, rtol=1e-5, atol=0)
        if grad.norm() <= limit:
            assert torch.equal(clipped[name], grad), "what is small enough stays to the bit"


def test_each_element_is_clipped_to_a_value() -> None:
    plain = grads_after(net())
    model = net()
    with clip_gradients(model, max_value=0.5):
        clipped = grads_after(model)
    for name, grad in plain.items():
        assert torch.equal(clipped[name], grad.clamp(-0.5, 0.5))


@given(
    grad=arrays.arrays(np.float32, (2, 3), elements=st.floats(-(2.0**100), 2.0**100, width=32)),
    limit=st.floats(2.0**-20, 2.0**20),
)
def test_a_clipped_gradient_keeps_its_direction(grad: np.ndarray, limit: float) -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    model = nn.Module()
    model.register_parameter("w", parameter)
    with clip_gradients(model, max_norm=limit):
        parameter.backward(torch.from_numpy(grad))
    wide = grad.astype(np.float64)
    norm = np.linalg.norm(wide)
    expected = wide * min(1.0, limit / norm) if norm else wide
    np.testing.assert_allclose(parameter.grad.double(), expected, rtol=1e-6, atol=1e-38)


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_value": 1.0}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_clipping_does_not_hide_what_is_not_finite(options: dict[str, float], bad: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    with clip_gradients(model, **options):
        model.weight.backward(torch.tensor([[bad, -5.0]]))
    finite = -5.0 if "max_norm" in options else -1.0
    expected = torch.tensor([[bad, finite]])
    torch.testing.assert_close(model.weight.grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_every_dtype_is_clipped(dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4, bias=False, dtype=dtype)
    grad = torch.full((4, 4), 3000.0).to(dtype)
    with clip_gradients(model, max_norm=0.001):
        model.weight.backward(grad)
    assert model.weight.grad.dtype == dtype
    assert torch.linalg.vector_norm(model.weight.grad).item() == pytest.approx(0.001, rel=0.01)
    model.zero_grad()
    with clip_gradients(model, max_value=0.5):
        model.weight.backward(grad)
    assert torch.equal(model.weight.grad, torch.full((4, 4), 0.5).to(dtype))


def test_sparse_gradients_are_changed_like_dense_ones() -> None:
    rows = torch.tensor([1, 1, 2])
    for make in (
        lambda model: clip_gradients(model, max_norm=1.5),
        lambda model: clip_gradients(model, max_value=1.5),
        lambda model: scale_gradients(model, "*", -2.0),
        lambda model: zero_gradients(model, "*"),
    ):
        grads = []
        for sparse in (False, True):
            model = nn.Embedding(4, 2, sparse=sparse)
            with make(model):
                model(rows).sum().backward()
            grad = model.weight.grad
            assert grad.is_sparse == sparse
            grads.append(grad.to_dense())
        torch.testing.assert_close(grads[0], grads[1])


def test_gradients_are_zeroed_and_scaled_by_name() -> None:
    plain = grads_after(net())
    model = net()
    with zero_gradients(model, "fc*.bias"), scale_gradients(model, "encoder", -0.5):
        changed = grads_after(model)
    for name, grad in plain.items():
        factor = {"encoder": -0.5, "fc1": 0.0, "fc2": 0.0}[name.partition(".")[0]]
        factor = 1.0 if name == "fc1.weight" else factor
        assert torch.equal(changed[name], grad * factor), name


def test_zeroed_gradients_hide_what_is_not_finite() -> None:
    model = nn.Linear(1, 1, bias=False)
    with zero_gradients(model, "weight"):
        model.weight.backward(torch.tensor([[torch.nan]]))
    assert model.weight.grad.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("encoder.0", ["encoder.0.weight", "encoder.0.bias"]),
        ("*.bias", ["encoder.0.bias", "encoder.2.bias", "fc1.bias", "fc2.bias"]),
        ("fc2.weight", ["fc1.weight"]),  # by another of its names
        (["fc1.bias", "encoder.2.b*"], ["encoder.2.bias", "fc1.bias"]),
        (lambda name, module: name == "fc1", ["fc1.weight", "fc1.bias"]),
        (nn.Sequential, [f"encoder.{k}" for k in ("0.weight", "0.bias", "2.weight", "2.bias")]),
    ],
)
def test_parameters_are_selected_like_modules(select: object, names: list[str]) -> None:
    model = net()
    with zero_gradients(model, select):
        grads = grads_after(model)
    assert [name for name, grad in grads.items() if not grad.any()] == names


def test_names_need_not_spell_wrappers() -> None:
    model = nn.DataParallel(net())
    with zero_gradients(model, "fc1.bias"):
        assert not grads_after(model)["module.fc1.bias"].any()


def test_each_backward_pass_is_changed_by_itself() -> None:
    plain = grads_after(net())["fc1.weight"]
    limit = 0.1 * plain.norm().item()
    model = net()
    with clip_gradients(model, max_norm=limit):
        grads = grads_after(model, passes=3)
    assert grads["fc1.weight"].norm().item() == pytest.approx(3 * limit, rel=1e-4)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_shared_and_checkpointed_parameter_is_changed_once(use_reentrant: bool) -> None:
    layer = nn.Linear(3, 3)
    x = torch.randn(2, 3, requires_grad=True)

    def loss() -> Tensor:
        return checkpoint(lambda v: layer(layer(v)), x, use_reentrant=use_reentrant).sum()

    plain = torch.autograd.grad(layer(layer(x)).sum(), layer.weight)[0]
    with scale_gradients(layer, "weight", 10.0):
        loss().backward()
    torch.testing.assert_close(layer.weight.grad, 10 * plain)


def test_a_scaler_tells_the_bound_without_its_factor() -> None:
    plain = grads_after(net())
    limit = min(g.norm().item() for g in plain.values())
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.manual_seed(1)
    with clip_gradients(model, max_norm=limit, scaler=scaler):
        scaler.scale(100 * model(torch.randn(5, 3)).square().sum()).backward()
    scaler.unscale_(optimizer)
    for name, p in model.named_parameters():
        expected = plain[name] * (limit / plain[name].norm())
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-7)


def test_the_graph_of_a_second_derivative_holds_the_change() -> None:
    model = nn.Linear(1, 1, bias=False)
    x = torch.tensor([[3.0]])
    with scale_gradients(model, "*", 2.0), clip_gradients(model, max_norm=1e6):
        [first] = torch.autograd.grad(model(x).pow(2).sum(), model.weight, create_graph=True)
        assert first.item() == pytest.approx(2 * 2 * 9 * model.weight.item())
    [second] = torch.autograd.grad(first.sum(), model.weight)
    assert second.item() == pytest.approx(2 * 2 * 9)


def test_the_factor_of_clipping_is_a_constant_to_a_second_derivative() -> None:
    model = nn.Linear(1, 1, bias=False)
    with clip_gradients(model, max_norm=1e-3):
        [first] = torch.autograd.grad(
            model(torch.tensor([[3.0]])).pow(2).sum(), model.weight, create_graph=True
        )
    [second] = torch.autograd.grad(first.sum(), model.weight)
    assert abs(first.item()) == pytest.approx(1e-3)
    assert second.item() == pytest.approx(18 * 1e-3 / (18 * model.weight.abs().item()))


@pytest.mark.parametrize("before", [True, False])
def test_a_compiled_model_is_clipped(before: bool) -> None:
    model = net()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if not before:
        grads_after(compiled)
    with clip_gradients(compiled, max_norm=0.25):
        grads = grads_after(compiled)
    assert max(g.norm().item() for g in grads.values()) == pytest.approx(0.25)
    assert max(g.norm().item() for g in grads_after(compiled).values()) > 1.0


# --- life cycle ----------------------------------------------------------------------------------

MAKERS: list[Callable[[nn.Module], Intervention]] = [
    lambda model: clip_gradients(model, max_norm=0.1),
    lambda model: clip_gradients(model, max_value=0.1),
    lambda model: zero_gradients(model, "*"),
    lambda model: scale_gradients(model, "*", 0.5),
    lambda model: prune_activations(model, threshold=0.5),
]


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) + sum(
        len(p._backward_hooks or ()) for p in model.parameters()
    )


@pytest.mark.parametrize("make", MAKERS)
def test_removing_brings_back_the_plain_network(make: Callable[[nn.Module], Intervention]) -> None:
    plain, model = grads_after(net()), net()
    handle = make(model)
    assert not all(torch.equal(g, plain[n]) for n, g in grads_after(model).items())
    handle.remove()
    handle.remove()
    assert hooks_on(model) == 0
    assert all(torch.equal(g, plain[n]) for n, g in grads_after(model).items())


@pytest.mark.parametrize("make", MAKERS)
def test_hooks_are_removed_when_the_body_raises(make: Callable[[nn.Module], Intervention]) -> None:
    model = net()
    with pytest.raises(ZeroDivisionError), make(model):
        raise ZeroDivisionError
    assert hooks_on(model) == 0


@pytest.mark.parametrize("make", MAKERS)
def test_copies_and_files_are_without_the_intervention(
    make: Callable[[nn.Module], Intervention], tmp_path: Path
) -> None:
    plain, model = grads_after(net()), net()
    with make(model):
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded]
        for other in copies:
            assert all(torch.equal(g, plain[n]) for n, g in grads_after(other).items())


@pytest.mark.parametrize("make", MAKERS)
def test_a_dropped_handle_keeps_no_model_alive_and_stays_in_force(
    make: Callable[[nn.Module], Intervention],
) -> None:
    plain, model = grads_after(net()), net()
    make(model)
    assert not all(torch.equal(g, plain[n]) for n, g in grads_after(model).items())
    handle, gone = make(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    handle.remove()


def test_interventions_work_together_and_the_logger_shows_them(tmp_path: Path) -> None:
    model, recorder = net(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=[recorder]):
        grads_after(model)
        optimizer.step()
        with (
            scale_gradients(model, "encoder", 1000.0),
            clip_gradients(model, max_norm=0.01),
            zero_gradients(model, "fc2"),
        ):
            grads_after(model)
            optimizer.step()
        grads_after(model)
        optimizer.step()
    before, during, after = (
        dict(zip(names(r), r.grad_norms, strict=True)) for r in recorder.records
    )
    assert before == after
    assert during["encoder.0.weight"] == pytest.approx(0.01)
    assert during["fc1.bias"] == pytest.approx(0.01)
    assert during["fc1.weight"] == during["fc2.bias"] == 0.0
    shown = recorder.records[1].grads["encoder.0.weight"].sketch
    assert shown.norm == pytest.approx(0.01, rel=1e-4)


def names(record: object) -> list[str]:
    return [parameter.name for parameter in record.layout.parameters]


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: clip_gradients(m), ValueError, "needs either max_norm=... or max_value=..."),
        (
            lambda m: clip_gradients(m, 1.0),
            TypeError,
            r"select=1.0\): .* give a bound as max_norm=1.0 or",
        ),
        (lambda m: clip_gradients(m, max_norm=1, max_value=1), ValueError, "needs either"),
        (lambda m: clip_gradients(m, max_norm=0), ValueError, r"max_norm=0\): must be positive"),
        (lambda m: clip_gradients(m, max_value=float("nan")), ValueError, "must be positive"),
        (lambda m: clip_gradients(m, max_value="1"), TypeError, r"max_value='1'\): must be a num"),
        (lambda m: clip_gradients(m, max_norm=1, scaler=2), TypeError, r"\(scaler=...\): must be"),
        (lambda m: clip_gradients("m", max_norm=1), TypeError, r"clip_gradients\(model=...\)"),
        (
            lambda m: clip_gradients(m, "encodr.*", max_norm=1),
            ValueError,
            r'clip_gradients\(select="encodr.\*"\): matches none of the 8 parameters and 7 modules'
            r"; the closest names are encoder",
        ),
        (lambda m: zero_gradients(m, "encoder.1"), ValueError, "selects none of the 8 parameters"),
        (lambda m: zero_gradients(m, 3), TypeError, r"zero_gradients\(select=3\)"),
        (lambda m: scale_gradients(m, "fc1", True), TypeError, r"factor=True\): must be a number"),
        (lambda m: scale_gradients(m, "fc1", float("inf")), ValueError, "must be finite"),
    ],
)
def test_bad_arguments_are_named(
    call: Callable[[nn.Module], object], error: type[Exception], message: str
) -> None:
    model = net()
    with pytest.raises(error, match=message):
        call(model)
    assert hooks_on(model) == 0


def test_frozen_parameters_are_passed_over_unless_all_are() -> None:
    model = net()
    model.encoder.requires_grad_(False)
    with clip_gradients(model, max_norm=0.1):
        assert max(g.norm() for g in grads_after(model).values()) < 0.11
    with pytest.raises(ValueError, match="all 4 selected parameters are frozen"):
        zero_gradients(model, "encoder")

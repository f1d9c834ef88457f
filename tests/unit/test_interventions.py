"""Changed gradients and activations, and captured inputs and outputs of modules."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint

from telemetry import HookLogger
from telemetry.interventions import (
    Intervention,
    capture,
    clip_gradients,
    prune_activations,
    scale_gradients,
    zero_gradients,
)
from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.loops import batches, is_hooked, small_cnn
from tests.helpers.twins import assert_left_alone, by_pickle, by_saving

Make = Callable[[nn.Module], Intervention]

# --- gradients -----------------------------------------------------------------------------------


def net() -> nn.Module:
    """An encoder and two layers that share a weight."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    model = Applied(encoded, encoder=encoder, fc1=nn.Linear(3, 3), fc2=nn.Linear(3, 3))
    model.fc2.weight = model.fc1.weight
    return model


def encoded(model: Any, x: Tensor) -> Tensor:
    return model.fc2(model.fc1(model.encoder(x)).relu_())


def grads_after(model: nn.Module, passes: int = 1) -> dict[str, Tensor]:
    """Return the gradients after ``passes`` equal backward passes."""
    torch.manual_seed(1)
    x = torch.randn(5, 3)
    model.zero_grad()
    for _ in range(passes):
        (100 * model(x).square().sum()).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


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
    if norm < 0.999 * limit:
        assert torch.equal(parameter.grad, torch.from_numpy(grad)), "equal bit by bit"


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"max_value": 1.0}])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_clipping_does_not_hide_nan_and_infinity(options: dict[str, float], bad: float) -> None:
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


@pytest.mark.parametrize(
    "make",
    [
        lambda model: clip_gradients(model, max_norm=1.5),
        lambda model: clip_gradients(model, max_value=1.5),
        lambda model: scale_gradients(model, "*", -2.0),
    ],
)
def test_sparse_gradients_are_changed_like_dense_ones(make: Make) -> None:
    models = [nn.Embedding(4, 2, sparse=sparse) for sparse in (False, True)]
    for model in models:
        with make(model):
            model(torch.tensor([1, 1, 2])).sum().backward()
    dense, sparse = (model.weight.grad for model in models)
    assert sparse.is_sparse
    torch.testing.assert_close(sparse.to_dense(), dense)


@pytest.mark.parametrize(
    ("select", "names"),
    [
        ("encoder.0", ["encoder.0.weight", "encoder.0.bias"]),
        ("*.bias", ["encoder.0.bias", "encoder.2.bias", "fc1.bias", "fc2.bias"]),
        ("fc2.weight", ["fc1.weight"]),  # by another of its names
        (["fc1.bias", "encoder.2.b*"], ["encoder.2.bias", "fc1.bias"]),
        (lambda name, module: name == "fc1", ["fc1.weight", "fc1.bias"]),
        (nn.Sequential, [f"encoder.{k}" for k in ("0.weight", "0.bias", "2.weight", "2.bias")]),
        (["fc*", "!*.bias"], ["fc1.weight"]),
        ("!fc*", [f"encoder.{k}" for k in ("0.weight", "0.bias", "2.weight", "2.bias")]),
    ],
)
def test_parameters_are_selected_like_modules(select: object, names: list[str]) -> None:
    model = net()
    with zero_gradients(model, select):
        grads = grads_after(model)
    assert [name for name, grad in grads.items() if not grad.any()] == names


def test_each_backward_pass_is_changed_separately() -> None:
    limit, model = 0.1 * grads_after(net())["fc1.weight"].norm().item(), net()
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


def test_the_clipping_bound_excludes_the_factor_of_a_scaler() -> None:
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


MAKERS: list[Make] = [
    lambda model: clip_gradients(model, max_norm=0.1),
    lambda model: scale_gradients(model, "*", 0.5),
    lambda model: prune_activations(model, threshold=0.5),
]


@pytest.mark.parametrize("make", MAKERS)
def test_removing_or_raising_restores_the_plain_network(make: Make) -> None:
    plain, model = grads_after(net()), net()
    with suppress(ZeroDivisionError), make(model) as handle:
        assert not same(grads_after(model), plain)
        raise ZeroDivisionError
    handle.remove()
    assert not is_hooked(model)
    assert same(grads_after(model), plain)


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(grad, expected[name]) for name, grad in got.items())


@pytest.mark.slow
@pytest.mark.parametrize("make", [MAKERS[0], MAKERS[2]])
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_is_changed_until_the_intervention_is_removed(
    make: Make, compiled_before: bool
) -> None:
    torch.compiler.reset()
    plain, model, twin = grads_after(net()), net(), net()
    with make(twin):
        changed = grads_after(twin)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    if compiled_before:
        grads_after(compiled)
    for _ in range(2):
        with make(compiled):
            assert_all_close(grads_after(compiled), changed)
        assert_all_close(grads_after(compiled), plain)


def assert_all_close(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    by_name = {name.removeprefix("_orig_mod."): grad for name, grad in got.items()}
    torch.testing.assert_close(by_name, expected)


@pytest.mark.parametrize("make", MAKERS)
def test_copies_and_saved_models_have_no_intervention(make: Make) -> None:
    plain, model = grads_after(net()), net()
    with make(model):
        for copied in (copy.deepcopy, by_pickle, by_saving):
            assert same(grads_after(copied(model)), plain)


def test_interventions_combine_and_the_logger_records_the_result() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture_run(model) as run:
        plain = grads_after(model)
        optimizer.step()
        with (
            scale_gradients(model, "encoder", -1000.0),
            clip_gradients(model, max_norm=0.01),
            zero_gradients(model, "fc2"),
        ):
            changed = grads_after(model)
            optimizer.step()
    record = run.records[1]
    names = [parameter.name for parameter in record.layout.parameters]
    norms = dict(zip(names, record.grad_norms, strict=True))
    assert [norms["encoder.0.weight"], norms["fc1.bias"]] == pytest.approx([0.01, 0.01])
    assert norms["fc1.weight"] == norms["fc2.bias"] == 0.0
    assert record.grads["encoder.0.weight"].sketch.norm == pytest.approx(0.01, rel=1e-4)
    assert (changed["encoder.0.weight"] * plain["encoder.0.weight"] <= 0).all()


def test_frozen_parameters_are_skipped_unless_all_are() -> None:
    model = net()
    model.encoder.requires_grad_(False)
    with clip_gradients(model, max_norm=0.1):
        assert max(g.norm() for g in grads_after(model).values()) < 0.11
    with pytest.raises(ValueError, match="all 4 selected parameters are frozen"):
        zero_gradients(model, "encoder")


# --- activations ---------------------------------------------------------------------------------


Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Answer:
    values: Tensor
    others: object = "logits"


X = torch.tensor([-2.0, -0.5, -0.49, 0.0, 0.3, 0.5, torch.nan, torch.inf])


def test_small_magnitudes_become_zero_and_have_no_gradient() -> None:
    model, x = nn.Identity(), X.clone().requires_grad_()
    with prune_activations(model, threshold=0.5):
        y = model(x)
    expected = torch.tensor([-2.0, -0.5, 0.0, 0.0, 0.0, 0.5, torch.nan, torch.inf])
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    upstream = torch.arange(1.0, 9.0)
    upstream[3] = torch.nan
    y.backward(upstream)
    assert x.grad.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 6.0, 7.0, 8.0]


@pytest.mark.parametrize(
    "value", [torch.tensor([0, 1]), torch.tensor([False]), None, MappingProxyType({"a": X})]
)
def test_other_values_than_floating_point_tensors_are_unchanged(value: object) -> None:
    model = Applied(lambda _, x: value)
    with prune_activations(model, threshold=0.5):
        assert model(X) is value


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: (x, [x, None, 3]), lambda y: [y[0], y[1][0]]),
        (lambda x: Pair(x, "words"), lambda y: [y.first]),
        (lambda x: {"a": x, "b": {"c": x}}, lambda y: [y["a"], y["b"]["c"]]),
        (lambda x: OrderedDict(a=x), lambda y: [y["a"]]),
        (lambda x: Answer(x), lambda y: [y.values]),
        (lambda x: x.sort(), lambda y: [y.values]),
        (lambda x: pack_sequence([x]), lambda y: [y.data]),
    ],
)
def test_every_structure_is_rebuilt_as_it_was(
    make: Callable[[Tensor], object], read: Callable[[object], list[Tensor]]
) -> None:
    model = Applied(lambda _, x: make(x))
    plain = model(X[:6])
    kept = [t.clone() for t in read(plain)]
    with prune_activations(model, threshold=0.5):
        pruned = model(X[:6])
    assert type(pruned) is type(plain)
    for before, after in zip(kept, read(pruned), strict=True):
        assert torch.equal(after, torch.where(before.abs() < 0.5, 0.0, before))


# --- capturing -----------------------------------------------------------------------------------


def test_captured_values_and_gradients_equal_those_of_the_network() -> None:
    model, x = small_cnn(), torch.randn(8, 1, 8, 8)
    torch.manual_seed(1)
    values = [model[0](x)]
    values += [model[1](values[0])]
    values += [values[1].relu()]
    grads = torch.autograd.grad(model[3:](values[2]).sum(), values)
    torch.manual_seed(1)
    with capture(model, "[012]") as captured:
        with pytest.raises(KeyError, match="'1' has not run since"):
            captured["1"]
        model(x).sum().backward()
        with pytest.raises(KeyError, match="'5' is not captured; choose from 0, 1, 2"):
            captured["5"]
    assert list(captured) == ["0", "1", "2"]
    for call, taken, value, expected in zip(
        captured.values(), [x, *values[:2]], values, grads, strict=True
    ):
        [output], [grad], [given] = call.outputs, call.grad_outputs, call.inputs
        assert torch.equal(given, taken), "although the last one changes it in place"
        assert torch.equal(output, value)
        assert torch.equal(grad, expected)
        assert not output.requires_grad


def test_capturing_changes_nothing_bit_for_bit(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        with ExitStack() as stack:
            if logger is not None:
                captured = stack.enter_context(capture(model, nn.Module))
            yield from batches(model, steps=3)
        if logger is not None:
            assert captured["5"].grad_outputs[0] is not None

    assert_left_alone(small_cnn, loop, tmp_path)


def test_structures_and_keyword_arguments_are_traversed() -> None:
    def answer_to(_: nn.Module, x: Tensor, *, scale: Tensor, words: str = "") -> Answer:
        return Answer(x * scale, {"square": x * x, "index": x.argmax()})

    model, x = Applied(answer_to), torch.randn(3, requires_grad=True)
    with capture(model) as captured:
        answer = model(x, scale=torch.tensor(2.0), words="words")
        answer.values.sum().backward(retain_graph=True)
        (3 * answer.values).sum().backward()
    call, expected = captured[""], [answer.values, *answer.others.values()]
    assert [t.tolist() for t in call.inputs] == [x.tolist(), 2.0]
    assert [t.tolist() for t in call.outputs] == [t.tolist() for t in expected]
    assert call.grad_outputs[0].tolist() == [4.0] * 3
    assert call.grad_outputs[1:] == (None, None)


def test_the_latest_calls_of_a_shared_module_are_kept() -> None:
    model = nn.Linear(2, 2)
    x = torch.randn(1, 2)
    with capture(model, calls=2) as captured:
        values = [x]
        for _ in range(3):
            values.append(model(values[-1]))
            values[-1].retain_grad()
        values[-1].sum().backward()
    calls = captured.calls("")
    assert captured[""] is calls[-1]
    assert len(calls) == 2
    for call, inputs, returned in zip(calls, values[1:-1], values[2:], strict=True):
        assert torch.equal(call.inputs[0], inputs)
        assert torch.equal(call.outputs[0], returned)
        assert torch.equal(call.grad_outputs[0], returned.grad)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_values_are_captured(mode: Callable[[], Any]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with capture(model) as captured, mode():
        y = model(torch.randn(1, 2))
    assert torch.equal(captured["0"].outputs[0], y)
    assert not captured["0"].outputs[0].is_inference()
    assert captured["0"].grad_outputs == (None,)


def test_reentrant_checkpointing_and_parameters_have_values_without_gradients() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    passes_on = Applied(lambda m, x: m.rows)
    passes_on.rows = nn.Parameter(torch.ones(1, 2))
    for model, run in ((layer, checkpoint), (passes_on, lambda model, x, **_: model(x))):
        with capture(model) as captured:
            y = run(model, x, use_reentrant=True)
            y.sum().backward()
        [call] = captured.values()
        assert torch.equal(call.outputs[0], y)
        assert call.grad_outputs == (None,)
        assert not is_hooked(model)


def test_checkpointing_gives_each_call_its_gradient() -> None:
    layer, drop = nn.Linear(2, 2), nn.Dropout(0.5)
    x = torch.randn(3, 2, requires_grad=True)

    def run(*, checkpointed: bool) -> list[tuple[Tensor, Tensor | None]]:
        def twice(v: Tensor) -> Tensor:
            return layer(drop(layer(v)))

        torch.manual_seed(2)
        with capture(layer, calls=9) as captured:
            y = x
            for _ in range(2):
                y = checkpoint(twice, y, use_reentrant=False) if checkpointed else twice(y)
            y.square().sum().backward()
        return [(call.outputs[0], call.grad_outputs[0]) for call in captured.calls("")]

    plain, checkpointed = run(checkpointed=False), run(checkpointed=True)
    assert len(plain) == 4
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)


def test_a_failed_call_is_not_kept_nor_are_its_inputs() -> None:
    def one_more(_: nn.Module, x: Tensor) -> Tensor:
        if x < 0:
            raise ArithmeticError
        return x + 1

    model = Applied(one_more)
    with capture(model, calls=9) as captured:
        with pytest.raises(ArithmeticError):
            model(torch.tensor(-1.0))
        model(torch.tensor(2.0))
    [call] = captured.calls("")
    assert [call.inputs[0].item(), call.outputs[0].item()] == [2.0, 3.0]


def test_calls_of_concurrent_threads_have_their_own_inputs() -> None:
    model, barrier = nn.Sequential(nn.Identity()), threading.Barrier(2, timeout=120)

    def meet(module: nn.Module, args: object) -> None:
        barrier.wait()

    with capture(model, calls=2) as captured:
        model[0].register_forward_pre_hook(meet)
        threads = [threading.Thread(target=model, args=[torch.full((1,), k)]) for k in (1.0, 2.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    calls = captured.calls("0")
    assert {c.inputs[0].item() for c in calls} == {1.0, 2.0}
    assert all(torch.equal(c.inputs[0], c.outputs[0]) for c in calls)


def test_capturing_gets_the_same_values_as_other_interventions_and_the_logger() -> None:
    model = nn.Sequential(nn.Linear(3, 30), nn.Tanh(), nn.Linear(30, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with (
        capture_run(model) as run,
        capture(model) as captured,
        prune_activations(model, "1", threshold=0.5),
        clip_gradients(model, max_norm=1e-3),
    ):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
    [record] = run.records
    zeros = (captured["1"].outputs[0] == 0).double().mean().item()
    assert zeros > 0.1
    assert record.activations["1"].sketch.zero_fraction == pytest.approx(zeros)
    assert torch.equal(captured["2"].inputs[0], captured["1"].outputs[0])
    grad = captured["1"].grad_outputs[0].double().norm().item()
    assert record.activation_grads["1"].sketch.norm == pytest.approx(grad, rel=1e-5)
    assert record.grad_norms.max() == pytest.approx(1e-3)


# The compiler reads .grad of each tensor at a graph break.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_can_be_captured(compiled_before: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    compiled = torch.compile(model, backend="aot_eager")
    x = torch.randn(4, 3)
    if compiled_before:
        compiled(x)
    plain = model(x)
    for _ in range(2):
        with capture(compiled) as captured:
            y = compiled(x)
            y.sum().backward()
        assert list(captured) == ["0", "1", "2"]
        assert torch.equal(y, plain)
        assert torch.equal(captured["2"].outputs[0], y)
        assert torch.equal(captured["1"].outputs[0], model[:2](x))
        assert torch.equal(captured["1"].grad_outputs[0], model[2].weight.expand(4, 3))
        assert torch.equal(compiled(x), plain)


def test_a_full_graph_cannot_be_captured() -> None:
    torch.compiler.reset()
    has_reason = "reason" in inspect.signature(torch.compiler.disable).parameters
    message = "compile without fullgraph=True" if has_reason else "_Calls.__call__"
    model = torch.compile(nn.Linear(3, 3), backend="aot_eager", fullgraph=True)
    with capture(model), pytest.raises(torch._dynamo.exc.Unsupported, match=message):
        model(torch.ones(1, 3))
    assert model(torch.ones(1, 3)).shape == (1, 3)


def test_calls_inside_a_function_transform_are_not_captured() -> None:
    model = nn.Linear(2, 2)
    with capture(model) as captured:
        torch.func.vmap(model)(torch.ones(3, 2))
    assert not captured


@pytest.mark.parametrize("way", ["raises", pytest.param("dropped", marks=pytest.mark.slow)])
def test_hooks_of_modules_and_of_the_graph_are_removed(way: str) -> None:
    model = small_cnn()
    captured = capture(model)
    y = model(torch.randn(4, 1, 8, 8))
    if way == "raises":
        with suppress(ZeroDivisionError), captured:
            raise ZeroDivisionError
        y.sum().backward()
        captured.remove()
        assert len(captured) == 6
        assert all(call.grad_outputs == (None,) for call in captured.values())
    else:
        del captured
        gc.collect()
    assert not is_hooked(model)


def test_neither_the_model_nor_its_graph_is_kept_alive() -> None:
    model, x = small_cnn(), torch.randn(4, 1, 8, 8, requires_grad=True)
    captured = capture(model)
    references = weakref.ref(model), weakref.ref(x)
    model(x)
    del model, x
    gc.collect()
    assert [ref() for ref in references] == [None, None]
    assert len(captured) == 6


# --- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: clip_gradients(m, 1.0), ValueError, "needs either max_norm=... or max_value=.."),
        (lambda m: clip_gradients(m, max_norm=1, max_value=1), ValueError, "needs either"),
        (lambda m: clip_gradients(m, max_norm=0), ValueError, r"max_norm=0\): must be positive"),
        (lambda m: clip_gradients(m, max_value="1"), TypeError, r"max_value='1'\): must be a num"),
        (lambda m: clip_gradients(m, max_norm=1, scaler=2), TypeError, r"\(scaler=...\): must be"),
        (
            lambda m: clip_gradients(m, "encodr.*", max_norm=1),
            ValueError,
            r'clip_gradients\(select="encodr.\*"\): matches none of the 8 parameters and 7 modules'
            r"; the closest are encoder",
        ),
        (lambda m: zero_gradients(m, "encoder.1"), ValueError, "selects none of the 8 parameters"),
        (lambda m: scale_gradients(m, "fc1", True), TypeError, r"factor=True\): must be a number"),
        (lambda m: scale_gradients(m, "fc1", float("inf")), ValueError, "must be finite"),
        (lambda m: prune_activations(m, threshold=-1), ValueError, "must be finite, at least 0"),
        (lambda m: prune_activations(m, 5, threshold=1), TypeError, r"activations\(select=5\)"),
        (lambda m: capture(m, calls=0), ValueError, r"capture\(calls=0\): must be at least 1"),
        (lambda m: capture(m, calls=1.5), TypeError, r"capture\(calls=1.5\): must be an int"),
        (lambda m: capture(m, "fk1"), ValueError, r'capture\(select="fk1"\): .* closest are fc1'),
    ],
)
def test_an_invalid_argument_is_named(
    call: Callable[[nn.Module], object], error: type[Exception], message: str
) -> None:
    model = net()
    with pytest.raises(error, match=message):
        call(model)
    assert not is_hooked(model)

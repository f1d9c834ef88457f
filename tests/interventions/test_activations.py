"""Pruning of activations."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.checkpoint import checkpoint
from twins import Recorder

from telemetry import HookLogger
from telemetry.interventions import prune_activations

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Answer:
    values: Tensor
    kind: str = "logits"


class Returns(nn.Module):
    """Returns a structure made of its input."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        return self.make(x)


X = torch.tensor([-2.0, -0.5, -0.49, 0.0, 0.3, 0.5, torch.nan, torch.inf])
PRUNED = torch.tensor([-2.0, -0.5, 0.0, 0.0, 0.0, 0.5, torch.nan, torch.inf])


def test_small_magnitudes_become_zero_and_have_no_gradient() -> None:
    model = nn.Identity()
    x = X.clone().requires_grad_()
    with prune_activations(model, threshold=0.5):
        y = model(x)
    torch.testing.assert_close(y, PRUNED, rtol=0, atol=0, equal_nan=True)
    upstream = torch.arange(1.0, 9.0)
    upstream[3] = torch.nan
    y.backward(upstream)
    assert x.grad.tolist() == [1.0, 2.0, 0.0, 0.0, 0.0, 6.0, 7.0, 8.0]


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
    model = Returns(make)
    plain = model(X[:6])
    kept = [t.clone() for t in read(plain)]
    with prune_activations(model, threshold=0.5):
        pruned = model(X[:6])
    assert type(pruned) is type(plain)
    for before, after in zip(kept, read(pruned), strict=True):
        assert torch.equal(after, torch.where(before.abs() < 0.5, 0.0, before))


def test_what_the_module_keeps_is_left_alone() -> None:
    for kept in ({"a": X}, [X], Answer(X)):
        model = Returns(lambda x, kept=kept: kept)
        with prune_activations(model, threshold=0.5):
            assert model(X) is not kept
    assert X.count_nonzero() == 7


def test_what_is_no_floating_point_tensor_stays_as_it_is() -> None:
    for value in (torch.tensor([0, 1]), torch.tensor([False]), None, MappingProxyType({"a": X})):
        model = Returns(lambda x, value=value: value)
        with prune_activations(model, threshold=0.5):
            assert model(X) is value


def test_only_selected_modules_are_pruned() -> None:
    model = nn.Sequential(OrderedDict(a=nn.Identity(), b=nn.Identity(), c=nn.Identity()))
    seen = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda m, a, out, name=name: seen.__setitem__(name, out))
    with prune_activations(model, "[bc]", threshold=1.0):
        model(X[:6])
    assert seen["a"].count_nonzero() == 5
    assert seen["b"].count_nonzero() == seen["c"].count_nonzero() == 1


def test_it_is_the_copy_that_is_pruned() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Identity())
    x = torch.randn(5, requires_grad=True)
    with prune_activations(model, threshold=0.5):
        model(x).sum().backward()
    plain = torch.tanh(x.detach())
    expected = torch.where(plain.abs() < 0.5, 0.0, 1 - plain**2)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_repeats_the_pruning(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    x = torch.randn(4, 3, requires_grad=True)
    grads = []
    with prune_activations(model, threshold=0.5):
        for run in (model, lambda x: checkpoint(model, x, use_reentrant=use_reentrant)):
            model.zero_grad()
            run(x).square().sum().backward()
            grads.append(model[0].weight.grad.clone())
    assert torch.equal(*grads)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_a_compiled_model_is_pruned_and_then_no_longer(compiled_before: bool) -> None:
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 3)
    plain = model(x)
    if compiled_before:
        assert torch.equal(compiled(x), plain)
    for _ in range(2):
        with prune_activations(compiled, threshold=0.5):
            pruned = model(x)
            assert torch.equal(compiled(x), pruned)
            assert not torch.equal(pruned, plain)
        assert torch.equal(compiled(x), plain)


def test_the_logger_shows_what_is_pruned(tmp_path: Path) -> None:
    model, recorder = nn.Sequential(nn.Linear(3, 50), nn.Tanh()), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    x = torch.randn(20, 3)
    pruned = []
    with HookLogger(model, tmp_path, every_n_steps=1, alerts=[recorder]):
        for threshold in (0.0, 0.5):
            with prune_activations(model, "1", threshold=threshold):
                pruned.append(model(x))
                pruned[-1].sum().backward()
            optimizer.step()
    for record, values in zip(recorder.records, pruned, strict=True):
        fraction = float(np.mean(values.detach().numpy() == 0))
        assert record.activations["1"].sketch.zero_fraction == fraction
    assert recorder.records[1].activations["1"].sketch.zero_fraction > 0.2


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"threshold": -1}, ValueError, r"threshold=-1\): must be finite, at least 0"),
        ({"threshold": float("nan")}, ValueError, "must be finite"),
        ({"threshold": "0.5"}, TypeError, r"threshold='0.5'\): must be a number"),
        ({"select": "O", "threshold": 1}, ValueError, r'prune_activations\(select="O"\): matches'),
        ({"select": 5, "threshold": 1}, TypeError, r"prune_activations\(select=5\)"),
        ({"select": nn.Conv2d, "threshold": 1}, ValueError, "selects none of the 2 modules"),
    ],
)
def test_bad_arguments_are_named(
    options: dict[str, object], error: type[Exception], message: str
) -> None:
    model = nn.Sequential(nn.ReLU())
    with pytest.raises(error, match=message):
        prune_activations(model, **options)
    assert not model[0]._forward_hooks

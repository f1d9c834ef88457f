"""Capture of a training loop by a few plain hooks, independent of the package."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from telemetry import StepRecord, TensorRecord
from tests.helpers.require import require
from tests.helpers.twins import Loop, Outcome, assert_left_alone, seed

Arrays = dict[str, list[np.ndarray]]


@dataclass
class HandStep:
    """Tensors of one step in their order of arrival, float64, by name."""

    activations: Arrays = field(default_factory=lambda: defaultdict(list))
    activation_grads: Arrays = field(default_factory=lambda: defaultdict(list))
    grads: Arrays = field(default_factory=lambda: defaultdict(list))


class TwoParts(nn.Module):
    """Two parts, for an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


def selective_checkpoint(block: nn.Module, x: Tensor) -> Any:
    """Run a block that saves its matrix products, and computes all else again."""
    make_contexts = require("torch.utils.checkpoint.create_selective_checkpoint_contexts")
    saved = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = partial(make_contexts, saved)
    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


_paused = False


@contextlib.contextmanager
def not_training() -> Iterator[None]:
    """Marks a part of a loop that must not be logged."""
    global _paused
    _paused = True
    try:
        yield
    finally:
        _paused = False


def by_hand(
    make: Callable[[], nn.Module],
    loop: Loop,
    *,
    flatten: Callable[[Any], list[Tensor]] | None = None,
) -> list[HandStep]:
    """Run the loop on a twin; return the values of each step (one yield of the loop).

    Outputs that are indices, counts or masks do not count.

    Gradients of parameters are those that are left when a step is over.

    Args:
        make: Makes the model.
        loop: Trains it.
        flatten: The tensors of an output; default: the output is a tensor.
    """
    seed(0)
    model = make()
    steps = [HandStep()]

    def take(name: str, output: Any) -> None:
        if _paused:
            return
        for index, tensor in enumerate(flatten(output) if flatten else [output]):
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            key = name if index == 0 else f"{name}[{index}]"
            steps[-1].activations[key].append(array(tensor))
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad, key=key: take_grad(key, grad))

    def take_grad(key: str, grad: Tensor) -> None:
        if not _paused:
            steps[-1].activation_grads[key].append(array(grad))

    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda m, a, out, name=name: take(name, out))
    seed(1)
    for _ in loop(model, None):
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                steps[-1].grads[name].append(array(parameter.grad))
        steps.append(HandStep())
    return steps[:-1]


def array(tensor: Tensor) -> np.ndarray:
    dense = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    return (dense.abs() if dense.is_complex() else dense).double().cpu().numpy().copy()


def check(
    make: Callable[[], nn.Module], loop: Loop, log_dir: Path, **options: Any
) -> tuple[Outcome, list[HandStep]]:
    """Check that training is left alone and that the logged values equal the captured ones."""
    flatten = options.pop("flatten", None)
    outcome = assert_left_alone(make, loop, log_dir, **options)
    expected = by_hand(make, loop, flatten=flatten)
    assert len(outcome.records) == len(expected)
    for record, step in zip(outcome.records, expected, strict=True):
        if record.full:
            assert_logged(record, step)
    return outcome, expected


def assert_logged(record: StepRecord, expected: HandStep) -> None:
    """Check that the record contains the tensors of a step and no others."""
    outputs = {str(output): tensor for output, tensor in record.outputs.items()}
    output_grads = {str(output): tensor for output, tensor in record.output_grads.items()}
    kinds: dict[str, tuple[Mapping[str, TensorRecord], Arrays]] = {
        "outputs": (outputs, expected.activations),
        "output_grads": (output_grads, expected.activation_grads),
        "grads": (record.grads, expected.grads),
    }
    for kind, (logged, arrays) in kinds.items():
        assert set(logged) == set(arrays), kind
        for name, values in arrays.items():
            assert_tensor(logged[name], values, f"{kind} {name}")
    for parameter, norm in zip(record.layout.parameters, record.grad_norms, strict=True):
        [grad] = expected.grads.get(parameter.name, [np.zeros(1)])
        wanted = pytest.approx(np.linalg.norm(grad), rel=1e-5, nan_ok=True)
        assert norm == wanted, parameter.name


def assert_tensor(logged: TensorRecord, values: list[np.ndarray], what: str = "") -> None:
    """One logged tensor holds all elements of ``values``."""
    flat = np.concatenate([v.ravel() for v in values])
    sketch = logged.sketch
    assert logged.calls == len(values), what
    assert sketch.count == flat.size, what
    finite = flat[np.isfinite(flat)]
    assert sketch.nonfinite_count == flat.size - finite.size, what
    if finite.size:
        size = np.abs(finite).sum()
        assert sketch.sum == pytest.approx(finite.sum(), rel=1e-5, abs=1e-5 * size + 1e-30), what
        assert sketch.sum_squares == pytest.approx(np.square(finite).sum(), rel=1e-5), what
        assert sketch.min == pytest.approx(finite.min(), rel=1e-6), what
        assert sketch.max == pytest.approx(finite.max(), rel=1e-6), what
        assert sketch.zero_count == np.sum(flat == 0), what

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
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
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


class PlainHooks:
    """Plain hooks on the layers of a model, during passes with gradients in training mode.

    Outputs that are indices, counts or masks do not count.

    Attributes:
        steps: Of each step the outputs, their gradients, and the gradients that optimizers are
            given.
    """

    def __init__(
        self, model: nn.Module, flatten: Callable[[Any], list[Tensor]], *, closures: bool
    ) -> None:
        self.model, self.steps = model, list[HandStep]()
        self._flatten, self._closures = flatten, closures
        self._hooked: set[nn.Module] = set()
        self._step = HandStep()

    def hook_all(self, *_: object) -> None:
        """Hook the modules that have no hook yet."""
        for module in set(self.model.modules()) - self._hooked:
            self._hooked.add(module)
            module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        names = [name for name, known in self.model.named_modules() if known is module]
        if not names or "parametrizations" in names[0] or _paused or not torch.is_grad_enabled():
            return
        parts = [name for name, _ in module.named_children() if name != "parametrizations"]
        # What checkpointing runs again counts if it was not taken the first time.
        again = torch._C._current_graph_task_id() != -1 and names[0] in self._step.activations
        if parts or again or not self.model.training:
            return
        for index, tensor in enumerate(self._flatten(output)):
            if tensor.is_floating_point() or tensor.is_complex():
                key = names[0] if index == 0 else f"{names[0]}[{index}]"
                self._step.activations[key].append(array(tensor))
                if tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(lambda grad, key=key: self._take_grad(key, grad))

    def _take_grad(self, key: str, grad: Tensor) -> None:
        if not _paused:
            self._step.activation_grads[key].append(array(grad))

    def before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._closures:  # or there is no gradient yet that it will step with
            self._take_grads({id(p) for group in optimizer.param_groups for p in group["params"]})

    def _take_grads(self, identities: set[int]) -> None:
        for name, parameter in self.model.named_parameters():
            if id(parameter) in identities and parameter.grad is not None:
                self._step.grads[name] = [array(parameter.grad)]

    def step_ended(self) -> None:
        if self._closures:
            self._take_grads({id(parameter) for parameter in self.model.parameters()})
        self.steps.append(self._step)
        self._step = HandStep()


def tensors_in(output: Any) -> list[Tensor]:
    """Return a tensor, or those in nested tuples."""
    if isinstance(output, tuple):
        return [tensor for part in output for tensor in tensors_in(part)]
    return [output] if isinstance(output, Tensor) else []


@contextlib.contextmanager
def plain_hooks(
    make: Callable[[], nn.Module],
    flatten: Callable[[Any], list[Tensor]] | None = None,
    *,
    closures: bool = False,
) -> Iterator[PlainHooks]:
    """Hook a twin, which the body trains.

    Args:
        make: Makes the model.
        flatten: The tensors of an output; default: :func:`tensors_in`.
        closures: Whether optimizers evaluate the model.
    """
    seed(0)
    hooks = PlainHooks(make(), flatten or tensors_in, closures=closures)
    handles = [
        register_optimizer_step_pre_hook(hooks.before_step),
        nn.modules.module.register_module_forward_pre_hook(hooks.hook_all),
    ]
    try:
        seed(1)
        yield hooks
    finally:
        for handle in handles:
            handle.remove()


def by_hand(
    make: Callable[[], nn.Module],
    loop: Loop,
    *,
    flatten: Callable[[Any], list[Tensor]] | None = None,
) -> list[HandStep]:
    """Run the loop on a twin; return the values of each step (one yield of the loop)."""
    with plain_hooks(make, flatten) as hooks:
        for _ in loop(hooks.model, None):
            hooks.step_ended()
    return hooks.steps


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

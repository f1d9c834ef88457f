"""Ready-made hooks that change gradients or activations, or capture them.

Each is active until :meth:`~Intervention.remove` or the end of its ``with`` block. They can be
combined with each other and with :class:`telemetry.HookLogger`, which shows their effect. Copies
and saved files of the model do not contain them. A compiled model is compiled again.

``select`` is like ``HookLogger(modules=...)``: a glob over names such as ``"encoder.*"``, a module
class, a ``predicate(name, module)``, or several of these. For gradients, a selected module selects
all parameters inside of it, and a glob may also match parameters, such as ``"fc*.bias"``.

Gradients are changed once in each backward pass, as the sum over all uses of a parameter, before
they are added to ``parameter.grad`` and ``DistributedDataParallel`` averages them; those that
``torch.autograd.grad`` returns are changed, too. A ``GradScaler`` multiplies the loss, so they
arrive with its factor. Frozen parameters are skipped. Gradients of parameters that ``fully_shard``
has split do not arrive this way and are not changed.

Wrong arguments raise ``TypeError`` or ``ValueError``, also if a glob matches nothing or if all
selected parameters are frozen.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.utils.hooks import RemovableHandle

from telemetry.capture.hooks import Inert, map_tensors, tensors_in
from telemetry.failures import Failures
from telemetry.selection import Selectors, select_modules, select_parameters
from telemetry.torch_private import (
    NO_TASK,
    backward_task,
    is_being_traced,
    scaler_state,
    undisturbed,
)
from telemetry.torch_private.compiler import drop_compiled_code, graph_break

__all__ = [
    "Captured",
    "Capturing",
    "Intervention",
    "capture",
    "clip_gradients",
    "prune_activations",
    "scale_gradients",
    "zero_gradients",
]

Self = TypeVar("Self", bound="Intervention")


class Intervention:
    """Hooks on a model, active until :meth:`remove` or the end of the ``with`` block.

    It does not keep the model alive.
    """

    def __init__(self, handles: list[RemovableHandle]) -> None:
        self._handles = handles

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the hooks; idempotent."""
        _remove(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _check_number(caller: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{caller}({name}={value!r}): must be a number")
    return value


# --- gradients -----------------------------------------------------------------------------------


def clip_gradients(
    model: nn.Module,
    select: Selectors | None = None,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    scaler: GradScaler | None = None,
) -> Intervention:
    """Bound the gradient of each parameter tensor as it arrives.

    ::

        with clip_gradients(model, max_norm=1.0):
            train()

    Each gradient is bounded separately: the norm over all ``k`` parameters, which
    ``clip_grad_norm_`` bounds, is then at most ``max_norm * sqrt(k)``. NaN and infinity stay:
    ``max_norm`` does not change a gradient that has any, and ``max_value`` does not change those
    elements. Nothing waits for an accelerator.

    Args:
        model: The model whose gradients are bounded.
        select: Which parameters; default: all.
        max_norm: Largest L2 norm of one tensor: larger ones are scaled down to it.
        max_value: Largest magnitude of an element: larger ones are set to it, with their sign.
        scaler: The scaler that multiplies the loss; the bound is then on gradients without its
            factor.
    """
    caller = "clip_gradients"
    if (max_norm is None) == (max_value is None):
        raise ValueError(f"{caller}(): needs either max_norm=... or max_value=...")
    name, given = ("max_value", max_value) if max_norm is None else ("max_norm", max_norm)
    limit = _check_number(caller, name, given)
    if not limit > 0:
        raise ValueError(f"{caller}({name}={limit}): must be positive")
    if not isinstance(scaler, GradScaler | None):
        raise TypeError(f"{caller}(scaler=...): must be a torch.amp.GradScaler")
    bounded = _bounded_values if max_norm is None else _bounded_norm

    def clip(grad: Tensor) -> Tensor:
        if grad.is_sparse:
            grad = grad.coalesce()
            sparse = grad.indices(), clip(grad.values()), grad.shape
            return torch.sparse_coo_tensor(*sparse, is_coalesced=True, check_invariants=False)
        state = None if scaler is None else scaler_state(scaler)
        if state is None:
            return bounded(grad, limit)
        return bounded(grad, state[0].to(grad.device, non_blocking=True).reshape(()) * limit)

    return _on_gradients(model, select, clip, caller)


def zero_gradients(model: nn.Module, select: Selectors) -> Intervention:
    """Set gradients to zero as they arrive, NaN and infinity included.

    The parameters still have a gradient, of zeros, so momentum of earlier steps and weight decay
    may still move them. To freeze a parameter, use ``requires_grad_(False)``.
    """
    return _on_gradients(model, select, torch.zeros_like, "zero_gradients")


def scale_gradients(model: nn.Module, select: Selectors, factor: float) -> Intervention:
    """Multiply gradients as they arrive by a finite factor, which may be negative.

    Optimizers that normalize by the gradient's size, such as Adam, cancel it.
    """
    if not math.isfinite(_check_number("scale_gradients", "factor", factor)):
        raise ValueError(f"scale_gradients(factor={factor}): must be finite")
    return _on_gradients(model, select, lambda grad: grad * factor, "scale_gradients")


def _on_gradients(
    model: nn.Module, select: Selectors | None, change: Callable[[Tensor], Tensor], caller: str
) -> Intervention:
    selected = select_parameters(model, select, caller=caller)
    trained = [parameter for parameter in selected.values() if parameter.requires_grad]
    if not trained:
        raise ValueError(
            f"{caller}(select=...): all {len(selected)} selected parameters are frozen; "
            "call it after requires_grad_(True)"
        )
    # Copies and saved files of a parameter are without its tensor hooks.
    return Intervention([parameter.register_hook(change) for parameter in trained])


def _bounded_norm(grad: Tensor, limit: float | Tensor) -> Tensor:
    values = grad.detach()
    # Squares of exploding gradients overflow float32; only Apple's devices have nothing wider.
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, wide))
    factor = torch.where((norm > limit) & norm.isfinite(), limit / norm, 1.0)
    # In half precision the factor would be rounded or underflow.
    exact = torch.promote_types(grad.dtype, torch.float32)
    return (grad.to(exact) * factor).to(grad.dtype)


def _bounded_values(grad: Tensor, limit: float | Tensor) -> Tensor:
    too_large = (grad.abs() > limit) & grad.isfinite()
    return torch.where(too_large, grad.sgn() * limit, grad).to(grad.dtype)


# --- activations ---------------------------------------------------------------------------------


def prune_activations(
    model: nn.Module, select: Selectors | None = None, *, threshold: float
) -> Intervention:
    """Set activations of small magnitude to zero: ``x`` becomes ``0`` where ``|x| < threshold``.

    Every floating-point tensor that a selected module (default: every leaf) returns is pruned, in
    training and in evaluation, the states of an LSTM included. Pruned elements have a gradient of
    zero, the others keep theirs. NaN and infinity are kept. The module's own tensor is not
    modified: later modules, and hooks that were registered earlier, receive a pruned copy.

    Under checkpointing, remove it only between steps, because the forward pass must run twice in
    the same way.
    """
    if not 0 <= _check_number("prune_activations", "threshold", threshold) < math.inf:
        raise ValueError(f"prune_activations(threshold={threshold}): must be finite, at least 0")

    hook = _Pruning(threshold)
    modules = select_modules(model, select, caller="prune_activations").values()
    pruning = Intervention([m.register_forward_hook(hook, prepend=True) for m in modules])
    drop_compiled_code()
    return pruning


class _Pruning(Inert):
    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(output, self._prune)

    def _prune(self, x: Tensor) -> Tensor:
        if not (x.is_floating_point() or x.is_complex()):
            return x
        # A comparison with NaN is false, so NaN stays.
        return x.masked_fill(x.detach().abs() < self._threshold, 0)


# --- capturing -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Captured:
    """Inputs and outputs of one call of a module: detached copies on the same device.

    Attributes:
        inputs: The tensors that it was called with, as they were before it ran; those in keyword
            arguments come last.
        outputs: The tensors that it returned, as they were before anything changed them in place.
    """

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    _grads: list[Tensor | None]
    _handles: list[RemovableHandle] = field(default_factory=list)

    @property
    def grad_outputs(self) -> tuple[Tensor | None, ...]:
        """The gradients with respect to :attr:`outputs`; None for outputs without one.

        Several backward passes through the same call add up, as in ``Tensor.grad``. A call that was
        checkpointed with ``use_reentrant=True`` has none: PyTorch gives them to a second call.
        """
        return tuple(self._grads)


def capture(model: nn.Module, select: Selectors | None = None, *, calls: int = 1) -> Capturing:
    """Capture the inputs and outputs of modules, and the gradients of the outputs.

    ::

        with capture(model, "conv*") as captured:
            loss_function(model(x), y).backward()
        captured["conv1"].outputs[0]       # what conv1 returned
        captured["conv1"].grad_outputs[0]  # the gradient of the loss with respect to it

    The network computes the same as without it, bit for bit, with two exceptions. In evaluation
    mode, PyTorch has a fast path for transformer layers without hooks, which rounds differently. A
    compiled model has graph breaks at the selected modules; with ``fullgraph=True``, it raises.

    Tensors are found in tuples, lists, mappings and dataclasses. A parameter that a module returns
    unchanged has no gradient here. Under a ``GradScaler``, gradients include its factor.

    Args:
        model: The model whose modules are captured.
        select: Which modules; default: every leaf module.
        calls: Number of calls of each module to keep, the latest ones. The returned object keeps
            them in memory.
    """
    if isinstance(calls, bool) or not isinstance(calls, int):
        raise TypeError(f"capture(calls={calls!r}): must be an int")
    if calls < 1:
        raise ValueError(f"capture(calls={calls}): must be at least 1")
    return Capturing(select_modules(model, select, caller="capture"), calls)


class Capturing(Intervention, Mapping[str, Captured]):
    """Latest call of each selected module that ran, by its name in ``named_modules()``.

    It can still be read after :meth:`remove`. When it is garbage-collected, its hooks are removed.
    """

    def __init__(self, modules: Mapping[str, nn.Module], calls: int) -> None:
        self._calls = {name: _Calls(name, calls) for name in modules}
        handles = []
        for name, hook in self._calls.items():
            handles.append(modules[name].register_forward_pre_hook(hook, with_kwargs=True))
            # Also called after an exception, to forget the inputs.
            after = modules[name].register_forward_hook(hook, with_kwargs=True, always_call=True)
            handles.append(after)
        super().__init__(handles)
        weakref.finalize(self, _remove, self._handles).atexit = False
        drop_compiled_code()

    def __getitem__(self, name: str) -> Captured:
        kept = self.calls(name)
        if not kept:
            raise KeyError(f"{name!r} has not run since capture() was called")
        return kept[-1]

    def __iter__(self) -> Iterator[str]:
        return (name for name, calls in self._calls.items() if calls.kept)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def calls(self, name: str) -> tuple[Captured, ...]:
        """Return the kept calls of one module, the latest one last."""
        if name not in self._calls:
            raise KeyError(f"{name!r} is not captured; choose from {', '.join(self._calls)}")
        return tuple(self._calls[name].kept)

    def remove(self) -> None:
        """Remove the hooks, also those on outputs without gradients yet; idempotent."""
        super().remove()
        for calls in self._calls.values():
            for call in calls.kept:
                _remove(call._handles)


class _Calls(Inert):
    """Hook before and after each call of a module, which keeps the latest calls."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name or "the model"
        self._most = most
        self._failures = Failures()
        # A stack for each thread: a module may call itself.
        self._inputs: dict[int, list[tuple[Tensor, ...]]] = defaultdict(list)
        self.kept: deque[Captured] = deque()

    @graph_break("capture() of telemetry needs graph breaks; compile without fullgraph=True")  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *output: Any) -> None:
        if backward_task() != NO_TASK:  # checkpointing repeats a call
            return
        running = self._inputs[threading.get_ident()]
        if not output:
            running.append(())
            with self._failures.contained(f"to capture the inputs of {self._name}"):
                running[-1] = _copies((args, kwargs))
            return
        with self._failures.contained(f"to capture the outputs of {self._name}"):
            inputs, [returned] = running.pop(), output
            found = tensors_in(returned)
            if returned is not None and not any(map(is_being_traced, found)):
                self._keep(inputs, found)

    def _keep(self, inputs: tuple[Tensor, ...], found: list[Tensor]) -> None:
        call = Captured(inputs=inputs, outputs=_copies(found), _grads=[None] * len(found))
        for index, tensor in enumerate(found):
            # Without a grad_fn it is a leaf, whose gradient sums over all its uses.
            if tensor.requires_grad and tensor.grad_fn is not None:
                # Not a method: the graph must not keep the copies.
                add = partial(_add, call._grads, index, self._failures)
                call._handles.append(tensor.register_hook(add))
        if len(self.kept) == self._most:
            _remove(self.kept.popleft()._handles)
        self.kept.append(call)


def _add(grads: list[Tensor | None], index: int, failures: Failures, grad: Tensor) -> None:
    with failures.contained("to capture a gradient"):
        _sum_up(grads, index, grad)


@undisturbed(always=True)
def _sum_up(grads: list[Tensor | None], index: int, grad: Tensor) -> None:
    earlier = grads[index]
    grads[index] = grad.detach().clone() if earlier is None else earlier + grad


@undisturbed(always=True)
def _copies(value: Any) -> tuple[Tensor, ...]:
    return tuple([tensor.detach().clone() for tensor in tensors_in(value)])

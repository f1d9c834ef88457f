"""PyTorch's private functions that capture relies on, each with what happens where it is missing.

Everything here may change between releases of PyTorch. Each function falls back to a documented
answer when the name behind it is gone, and logs once what that costs, so that a new release costs
detail and never a run.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
import torch._utils
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

log = logging.getLogger("telemetry")

F = TypeVar("F", bound=Callable[..., Any])

_MAX_FRAMES_BELOW_SCALER = 16
"""Calls between ``GradScaler.step`` and an optimizer's hook: 6 in PyTorch, more with wrappers."""

NO_TASK = -1
"""What :func:`backward_task` answers outside a backward pass."""

_logged: set[str] = set()


def _find(owner: object, name: str, loss: str) -> Any:
    """A private attribute; None where it is gone, and then ``loss`` is logged once."""
    found = getattr(owner, name, None)
    if found is None and name not in _logged:
        _logged.add(name)
        log.warning("telemetry: PyTorch %s has no %s; %s", torch.__version__, name, loss)
    return found


# --- backward passes -----------------------------------------------------------------------------


def backward_task() -> int:
    """Number of the backward pass that this thread is in; :data:`NO_TASK` outside of one.

    Without ``torch._C._current_graph_task_id`` always :data:`NO_TASK`: backward passes cannot be
    distinguished, so gradients of ``autograd.grad`` probes count as those of the step, and what
    checkpointing runs again as another call.
    """
    current = _find(
        torch._C,
        "_current_graph_task_id",
        "probes by autograd.grad and recomputation by checkpointing count as training",
    )
    return int(current()) if current is not None else NO_TASK


def at_end_of_backward(callback: Callable[[], object], *, deferred: int = 0) -> bool:
    """Run ``callback`` when the backward pass that this thread is in has ended.

    Such callbacks run in the order in which they were queued. A deferred one is then queued again,
    so many times, to come after others.

    Returns False, and does nothing, where the autograd engine offers no queue.
    """
    queue = _find(
        getattr(torch.autograd.Variable, "_execution_engine", None),
        "queue_callback",
        "gradient norms before clipping are not measured, and a step that is taken inside of a "
        "backward pass ends too early",
    )
    if queue is None:
        return False
    for _ in range(deferred):
        callback = functools.partial(queue, callback)
    queue(callback)
    return True


def backward_is_compiled() -> bool:
    """Whether compiled autograd is on, which would trace hooks on gradients and break at ours."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    return bool(getattr(config, "compiled_autograd", False))


# --- staying out of what the caller does ---------------------------------------------------------


class undisturbed:  # noqa: N801 - a context manager, named like torch.no_grad
    """Run PyTorch operations that neither autograd nor any mode of the caller sees.

    Switches off gradients, inference mode, autocast, torch-function and torch-dispatch modes: the
    statistics must not enter the cache of selective checkpointing, be recorded as a graph or run in
    half precision.

    Gives False where nothing may be done inside: where a torch-dispatch mode is active and there is
    no way to leave it, for selective checkpointing would take it for the model's; and while the
    work of a GPU is captured as a CUDA graph, for it would be done at every replay.

    A class, because entering a generator costs more than most of what runs inside.
    """

    __slots__ = ("_autocast", "_grad_enabled", "_stack")

    def __enter__(self) -> bool:
        self._grad_enabled = torch.is_grad_enabled()
        in_mode = torch.is_inference_mode_enabled() or _dispatch_modes() or _function_modes()
        # First of all, for torch-function modes see the rest.
        self._stack = _without_modes() if in_mode else None
        torch.set_grad_enabled(False)
        self._autocast = tuple(filter(torch.is_autocast_enabled, _device_types()))
        for device_type in self._autocast:
            torch.set_autocast_enabled(device_type, False)
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False
        return self._stack is None or _leave_dispatch_modes() is not None or not _dispatch_modes()

    def __exit__(self, *exception: object) -> None:
        for device_type in self._autocast:
            torch.set_autocast_enabled(device_type, True)
        torch.set_grad_enabled(self._grad_enabled)
        if self._stack is not None:
            self._stack.close()


def _dispatch_modes() -> bool:
    count = _find(
        torch._C, "_len_torch_dispatch_stack", "all active modes are left at each measurement"
    )
    return count is None or count() > 0


def _function_modes() -> bool:
    count = _find(
        torch._C, "_len_torch_function_stack", "all active modes are left at each measurement"
    )
    return count is None or count() > 0


def functions_are_seen() -> bool:
    """Whether a mode of the caller's sees what PyTorch's Python functions are called with."""
    return _function_modes()


def _leave_dispatch_modes() -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    from torch.utils import _python_dispatch

    leave: Callable[[], contextlib.AbstractContextManager[object]] | None = _find(
        _python_dispatch,
        "_disable_current_modes",
        "modules are not measured where a torch-dispatch mode is active, as it is in selective "
        "checkpointing",
    )
    return leave


def _without_modes() -> contextlib.ExitStack:
    stack = contextlib.ExitStack()
    functions_off = _find(torch._C, "DisableTorchFunction", "torch-function modes see measurements")
    if functions_off is not None:
        stack.enter_context(functions_off())
    leave = _leave_dispatch_modes()
    if leave is not None:
        stack.enter_context(leave())
    stack.enter_context(torch.inference_mode(False))
    return stack


@functools.cache
def _device_types() -> tuple[str, ...]:
    """The CPU and the accelerator that this PyTorch was built for."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def is_being_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values to measure: in a trace, a transform, on the meta device.

    Nor may a tensor be read while its stream is captured as a CUDA graph.
    """
    return (
        tensor.is_meta
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or _in_transform()
        or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _in_transform() -> bool:
    """Whether a transform of ``torch.func`` is running."""
    level = _find(
        getattr(torch._C, "_functorch", None),
        "maybe_current_level",
        "tensors inside of torch.func transforms are not recognized",
    )
    return level is not None and level() is not None


# --- GradScaler ----------------------------------------------------------------------------------


def calling_scaler() -> GradScaler | None:
    """The GradScaler in whose ``step()`` this thread is; None outside of one.

    It is found on the call stack: a scaler announces itself only to fused optimizers.
    """
    step_code = GradScaler.step.__code__
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES_BELOW_SCALER):
        if frame is None:
            return None
        if frame.f_code is step_code:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


def scaler_state(scaler: GradScaler) -> tuple[Tensor, Tensor] | None:
    """The scaler's factor and its count of good steps, tensors of shape ``[1]`` on its device.

    Its public methods would wait for the device. None where the private names are gone, and for a
    scaler that is switched off.
    """
    if not scaler.is_enabled():
        return None
    loss = "gradients are logged as GradScaler leaves them, skipped steps are not counted"
    scale, tracker = _find(scaler, "_scale", loss), _find(scaler, "_growth_tracker", loss)
    if isinstance(scale, Tensor) and isinstance(tracker, Tensor):
        return scale, tracker
    return None


def initial_scale(scaler: GradScaler) -> float | None:
    """The factor that the scaler began with, or was loaded with."""
    scale = _find(scaler, "_init_scale", "steps skipped before the first one are not counted")
    return None if scale is None else float(scale)


# --- the compiler --------------------------------------------------------------------------------


def keep_in_graph(operator: torch._ops.OpOverload) -> bool:
    """Keep an operator without results in compiled graphs, and its calls in order.

    Returns False where that cannot be said: the compiler then drops it as dead code, and compiled
    modules show no activations.
    """
    from torch import _higher_order_ops

    effects = getattr(_higher_order_ops, "effects", None)
    loss = "modules that torch.compile has compiled show no activations"
    register = _find(effects, "_register_effectful_op", loss)
    kinds = _find(effects, "_EffectType", loss)
    if register is None or kinds is None:
        return False
    register(operator, kinds.ORDERED)
    return True


def not_compiled(function: F) -> F:
    """``function``, which the compiler calls instead of tracing it; torch.compile is not loaded."""
    disable = _find(
        torch, "_disable_dynamo", "an optimizer whose step() is compiled is compiled with our hooks"
    )
    return function if disable is None else disable(function)


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process; 0 while it is not loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = _find(dynamo, "counters", "modules compiled before HookLogger are not recognized")
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def is_compiled(module: nn.Module) -> bool:
    """Whether this module was compiled by itself: by ``module.compile()`` or ``torch.compile``.

    False for one that a compiled function calls, and where the private name is gone.
    """
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = None if dynamo is None else _find(dynamo, "OptimizedModule", "see graphs_compiled")
    if wrapper is not None and isinstance(module, wrapper):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def drop_compiled_code() -> None:
    """Have everything that torch.compile has compiled in this process compiled again when called.

    Compiled code does not look whether modules have got hooks since. Without
    ``torch._dynamo.reset_code_caches`` those do nothing in modules that ran compiled before.
    """
    if graphs_compiled() == 0:
        return
    reset = _find(
        sys.modules.get("torch._dynamo"),
        "reset_code_caches",
        "hooks put on a model after it was compiled do nothing",
    )
    if reset is not None:
        reset()


_ASKED = "__prepare_scriptable__"
_before_scripting: list[Callable[[nn.Module], None]] = []


def before_scripting(callback: Callable[[nn.Module], None]) -> Callable[[], None]:
    """Have ``callback`` called with each module that ``torch.jit.script`` is about to compile.

    It compiles forward hooks along with a module, and fails at any that is not written for it. The
    one way to be called is ``__prepare_scriptable__``, which a class may define to be asked; until
    what is returned here is called, ``nn.Module`` has one.
    """
    _before_scripting.append(callback)
    if not hasattr(nn.Module, _ASKED):
        setattr(nn.Module, _ASKED, _prepare_scriptable)

    def forget() -> None:
        _before_scripting.remove(callback)
        if not _before_scripting and vars(nn.Module).get(_ASKED) is _prepare_scriptable:
            delattr(nn.Module, _ASKED)

    return forget


def _prepare_scriptable(module: nn.Module) -> nn.Module:
    for callback in _before_scripting:
        callback(module)
    return module


# --- arithmetic ----------------------------------------------------------------------------------


def norms_of(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Vector norm of each tensor, in ``dtype``, which is not narrower than theirs."""
    at_once = _find(torch, "_foreach_norm", "gradient norms take longer")
    if at_once is not None:
        return list(at_once(list(tensors), order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]

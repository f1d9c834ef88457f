"""PyTorch's private functions that capture relies on, each with what happens where it is missing.

Everything here may change between releases of PyTorch. Each function falls back to a documented
answer when the name behind it is gone, so that a new release costs detail and never a run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

_MAX_FRAMES_BELOW_SCALER = 16
"""Calls between ``GradScaler.step`` and an optimizer's hook: 6 in PyTorch, more with wrappers."""

NO_TASK = -1
"""What :func:`backward_task` answers outside a backward pass."""


def backward_task() -> int:
    """Number of the backward pass that this thread is in; :data:`NO_TASK` outside of one.

    Without ``torch._C._current_graph_task_id`` always :data:`NO_TASK`: backward passes cannot be
    told apart, so gradients of ``autograd.grad`` probes count as those of the step.
    """
    current = getattr(torch._C, "_current_graph_task_id", None)
    return int(current()) if current is not None else NO_TASK


def at_end_of_backward(callback: Callable[[], object]) -> bool:
    """Run ``callback`` when the backward pass that this thread is in has ended.

    Returns False, and does nothing, where the autograd engine offers no queue.
    """
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    queue = getattr(engine, "queue_callback", None)
    if queue is None:
        return False
    queue(callback)
    return True


class undisturbed:  # noqa: N801 - a context manager, named like torch.no_grad
    """Run PyTorch operations that neither autograd nor any mode of the caller sees.

    Switches off gradients, inference mode, autocast, torch-function and torch-dispatch modes: the
    statistics must not enter the cache of selective checkpointing, be recorded as a graph or run in
    half precision.
    A class, because entering a generator costs more than most of what runs inside.
    """

    __slots__ = ("_grad_enabled", "_stack")

    def __enter__(self) -> None:
        self._grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)
        self._stack = _without_modes() if _any_mode() else None

    def __exit__(self, *exception: object) -> None:
        if self._stack is not None:
            self._stack.close()
        torch._C._set_grad_enabled(self._grad_enabled)


def _any_mode() -> bool:
    return bool(
        torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._is_any_autocast_enabled()
        or torch.is_inference_mode_enabled()
    )


def _without_modes() -> contextlib.ExitStack:
    from torch.utils._python_dispatch import _disable_current_modes

    stack = contextlib.ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_disable_current_modes())
    for device_type in {"cpu", getattr(torch.accelerator.current_accelerator(), "type", "cpu")}:
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


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

    Its public methods would wait for the device. None where the private names are gone.
    """
    scale, tracker = getattr(scaler, "_scale", None), getattr(scaler, "_growth_tracker", None)
    if isinstance(scale, Tensor) and isinstance(tracker, Tensor):
        return scale, tracker
    return None


def keep_in_graph(operator: torch._ops.OpOverload) -> bool:
    """Keep an operator without results in compiled graphs, and its calls in order.

    Returns False where that cannot be said: the compiler then drops it as dead code, and compiled
    modules show no activations.
    """
    try:
        from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
    except ImportError:
        return False
    _register_effectful_op(operator, _EffectType.ORDERED)
    return True


def drop_compiled_code() -> None:
    """Have everything that torch.compile has compiled in this process compiled again when called.

    Compiled code does not look whether modules have got hooks since. Without
    ``torch._dynamo.reset_code_caches`` those do nothing in modules that ran compiled before.
    """
    reset = getattr(sys.modules.get("torch._dynamo"), "reset_code_caches", None)
    if reset is not None:
        reset()


def is_being_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` stands for values that are not there: in a trace, a transform, on meta."""
    return (
        tensor.is_meta
        or torch._C._is_tracing()
        or torch._C._functorch.maybe_current_level() is not None
        or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")
    )

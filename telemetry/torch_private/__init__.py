"""Private names of PyTorch for backward passes, modes, GradScaler and norms.

:mod:`module_calls` has those around calls of modules, :mod:`compiler` those of ``torch.compile``,
:mod:`ranks` those of ``torch.distributed``, and :mod:`host_copy` copies tensors without blocking
the training thread. A private name may be missing in another release of PyTorch; the functions here
then work without it, and log the consequence.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, overrides
from torch.amp.grad_scaler import GradScaler
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch

log = logging.getLogger("telemetry")

# Calls between ``GradScaler.step`` and what reads gradients: 12, more with wrappers.
_MAX_FRAMES_BELOW_STEP = 20

# Result of :func:`backward_task` outside of a backward pass.
NO_TASK = -1

_logged: set[str] = set()

Function = TypeVar("Function", bound=Callable[..., object])


def find(owner: object, name: str, consequence: str) -> Any:
    """Return a private attribute, or None if it is missing; then log the ``consequence`` once.

    ``owner`` may be None, if it is missing itself.
    """
    attribute = getattr(owner, name, None)
    if attribute is None and name not in _logged:
        _logged.add(name)
        log.warning("telemetry: PyTorch %s has no %s; %s", torch.__version__, name, consequence)
    return attribute


# --- backward passes -----------------------------------------------------------------------------


def _unknown_task() -> int:
    consequence = "probes by autograd.grad and recomputation by checkpointing count as training"
    find(torch._C, "_current_graph_task_id", consequence)
    return NO_TASK


backward_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", _unknown_task)
"""Return the number of this thread's backward pass; :data:`NO_TASK` outside of one."""


def at_end_of_backward(callback: Callable[[], object], *, deferred: int = 0) -> bool:
    """Call ``callback`` when the backward pass that this thread is in ends.

    Args:
        callback: Callbacks are called in the order in which they were queued.
        deferred: Number of times that it is put at the end of the queue again.

    Returns:
        False without a queue; ``callback`` is then never called.
    """
    queue = find(
        getattr(torch.autograd.Variable, "_execution_engine", None),
        "queue_callback",
        "gradient norms before clipping are not measured, and a step inside of a backward pass "
        "ends too early",
    )
    if queue is None:
        return False
    for _ in range(deferred):
        callback = functools.partial(queue, callback)
    queue(callback)
    return True


# --- modes ---------------------------------------------------------------------------------------


# The public one makes a context manager, too.
_set_grad_enabled = getattr(torch._C, "_set_grad_enabled", torch.set_grad_enabled)


def undisturbed(*, always: bool = False) -> Callable[[Function], Function]:
    """Return a decorator of functions that run outside of autograd and of the caller's modes.

    It switches off gradients, inference mode, autocast, torch-function and torch-dispatch modes. So
    statistics are not recorded as a graph, not computed in half precision, and not put into the
    cache of selective checkpointing.

    The function is not called, and the result is None, where operations must not run: a
    torch-dispatch mode cannot be left, or a CUDA graph is being captured, which would repeat them
    at each replay. ``always``: it reads no values and is called nevertheless.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def outside(*args: Any, **kwargs: Any) -> Any:
            grad_enabled = torch.is_grad_enabled()
            try:  # fast: each hook passes here
                dispatches = torch._C._len_torch_dispatch_stack() > 0
                in_functions = torch._C._len_torch_function_stack() > 0
                casts = torch._C._is_any_autocast_enabled()
            except AttributeError:
                dispatches, in_functions, casts = _in_dispatch_mode(), in_function_mode(), True
            in_mode = dispatches or torch.is_inference_mode_enabled()
            # First: torch-function modes would see the calls below.
            modes = _without_modes(all_modes=in_mode) if in_mode or in_functions else None
            autocast: tuple[str, ...] = ()
            if modes is not None:
                modes.__enter__()
            try:  # from here on, as Ctrl-C may raise anywhere
                if grad_enabled or modes is not None:  # leaving inference mode enables them
                    _set_grad_enabled(False)
                if casts:
                    autocast = tuple(filter(torch.is_autocast_enabled, _device_types()))
                for device_type in autocast:
                    torch.set_autocast_enabled(device_type, False)
                capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
                left = not in_mode or _leave_dispatch_modes() is not None or not _in_dispatch_mode()
                if always or (left and not capturing):
                    return function(*args, **kwargs)
            finally:
                for device_type in autocast:
                    torch.set_autocast_enabled(device_type, True)
                if grad_enabled:
                    _set_grad_enabled(True)
                if modes is not None:
                    modes.__exit__(None, None, None)

        return cast(Function, outside)

    return decorate


def _in_dispatch_mode() -> bool:
    return _modes("_len_torch_dispatch_stack") > 0


def in_function_mode() -> bool:
    """Whether a torch-function mode of the caller is active."""
    return _modes("_len_torch_function_stack") > 0


def enter_function_mode(mode: TorchFunctionMode) -> bool:
    """Enter a mode; False if a private name is missing, so that it could not be left."""
    push = _of_mode_stack("_push_mode")
    is_known = None not in (push, _of_mode_stack("_pop_mode"), _of_mode_stack(_MODE_STACK))
    if is_known:
        push(mode)
    return is_known


def leave_function_mode(mode: TorchFunctionMode) -> None:
    """Remove a mode from this thread's stack, also from below modes that were entered later."""
    stack = () if (of := _of_mode_stack(_MODE_STACK)) is None else of()
    if mode in stack:
        for _ in stack:
            _of_mode_stack("_pop_mode")()
        for other in stack:
            if other is not mode:
                _of_mode_stack("_push_mode")(other)


_MODE_STACK = "_get_current_function_mode_stack"


def _of_mode_stack(name: str) -> Any:
    return find(overrides, name, "attention is not measured")


def _modes(name: str) -> int:
    count = find(torch._C, name, "all active modes are left at each measurement")
    return 1 if count is None else int(count())


def _leave_dispatch_modes() -> Callable[[], contextlib.AbstractContextManager[object]] | None:
    consequence = (
        "modules are not measured where a torch-dispatch mode is active, as it is in selective "
        "checkpointing"
    )
    return find(_python_dispatch, "_disable_current_modes", consequence)  # type: ignore[no-any-return]


def _without_modes(*, all_modes: bool) -> contextlib.AbstractContextManager[object]:
    """Return a context without torch-function modes, and without ``all_modes``, which take longer.

    The latter are left before it is entered.
    """
    functions_off = find(torch._C, "DisableTorchFunction", "torch-function modes see measurements")
    off = contextlib.nullcontext() if functions_off is None else functions_off()
    if not all_modes:
        return off
    stack = contextlib.ExitStack()
    stack.enter_context(off)
    leave = _leave_dispatch_modes()
    if leave is not None:
        stack.enter_context(leave())
    stack.enter_context(torch.inference_mode(False))
    return stack


@functools.cache
def _device_types() -> tuple[str, ...]:
    """Return the CPU and the accelerator that this PyTorch was built for."""
    if hasattr(torch, "accelerator"):  # since PyTorch 2.6; before 2.8 it raises on the CPU
        with contextlib.suppress(RuntimeError):
            accelerator = torch.accelerator.current_accelerator()
            return ("cpu",) if accelerator is None else ("cpu", accelerator.type)
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


def is_being_traced(tensor: Tensor) -> bool:
    """Whether ``tensor`` has no values that can be read now.

    True while a function is traced or a CUDA graph is captured, in transforms of ``torch.func``,
    and on the meta device.
    """
    try:  # without find(): called in each hook
        if torch._C._functorch.maybe_current_level() is not None:
            return True
    except AttributeError:
        consequence = "tensors inside of torch.func transforms are not recognized"
        find(getattr(torch._C, "_functorch", None), "maybe_current_level", consequence)
    return (
        tensor.is_meta
        or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor")
        or (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


# --- GradScaler ----------------------------------------------------------------------------------


def calling_scaler() -> GradScaler | None:
    """Return the GradScaler whose ``step()`` is on this thread's call stack; None outside of one.

    A scaler passes itself to fused optimizers only.
    """
    for frame in callers(_MAX_FRAMES_BELOW_STEP):
        if frame.f_code is GradScaler.step.__code__:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
    return None


def is_called_by(caller: object) -> bool:
    """Whether an optimizer's hook runs inside of a method of ``caller``, on this thread."""
    return any(frame.f_locals.get("self") is caller for frame in callers(_MAX_FRAMES_BELOW_STEP))


def callers(most: int) -> list[FrameType]:
    """Return the innermost frames of this thread's call stack, from the caller's outwards."""
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < most:
        frames.append(frame)
        frame = frame.f_back
    return frames


def scaler_state(scaler: GradScaler) -> tuple[Tensor, Tensor] | None:
    """Return the scaler's factor and count of good steps, tensors of shape ``[1]`` on its device.

    Its public methods synchronize the device. None if the private names are missing, or the scaler
    is disabled.
    """
    if not scaler.is_enabled():
        return None
    consequence = "gradients are logged as GradScaler leaves them, skipped steps are not counted"
    scale, tracker = (
        find(scaler, "_scale", consequence),
        find(scaler, "_growth_tracker", consequence),
    )
    if isinstance(scale, Tensor) and isinstance(tracker, Tensor):
        return scale, tracker
    return None


def initial_scale(scaler: GradScaler) -> float | None:
    """Return the factor with which the scaler was made or loaded."""
    scale = find(scaler, "_init_scale", "steps skipped before the first one are not counted")
    return None if scale is None else float(scale)


# --- arithmetic ----------------------------------------------------------------------------------


def norms_of(tensors: Sequence[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Return the vector norm of each tensor, in ``dtype``, which is not narrower than theirs."""
    at_once = find(torch, "_foreach_norm", "gradient norms take longer")
    if at_once is not None and len(tensors) > 1:  # of one it takes two launches
        return list(at_once(list(tensors), order, dtype=dtype))
    return [torch.linalg.vector_norm(tensor, order, dtype=dtype) for tensor in tensors]

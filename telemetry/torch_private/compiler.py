"""Private functions of ``torch.compile`` and ``torch.jit``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch import nn
from torch.torch_version import TorchVersion

from telemetry.torch_private import find, log

F = TypeVar("F", bound=Callable[..., Any])

# Before, operators that observe a graph are dropped from it, or fail at operations in place.
GRAPHS_CAN_BE_OBSERVED = TorchVersion(torch.__version__) >= "2.13"


def keep_in_graph(operator: torch._ops.OpOverload) -> None:
    """Keep an operator without results, and the order of its calls, in compiled graphs."""
    if not GRAPHS_CAN_BE_OBSERVED:
        return
    from torch import _higher_order_ops

    effects = getattr(_higher_order_ops, "effects", None)
    consequence = "modules that torch.compile has compiled show no activations"
    register = find(effects, "_register_effectful_op", consequence)
    kinds = find(effects, "_EffectType", consequence)
    if register is not None and kinds is not None:
        register(operator, kinds.ORDERED)


def not_compiled(function: F) -> F:
    """Return ``function``, which the compiler calls and does not trace; without loading it."""
    disable = find(
        torch, "_disable_dynamo", "an optimizer whose step() is compiled is compiled with our hooks"
    )
    return function if disable is None else disable(function)


def graph_break(reason: str) -> Any:
    """Return a decorator of functions at which the compiler ends a graph and gives this reason.

    Loads the compiler, unlike :func:`not_compiled`.
    """
    try:
        return torch.compiler.disable(reason=reason)
    except TypeError:  # before PyTorch 2.7 it takes no reason
        return torch.compiler.disable()


class CompiledAutograd:
    """Watches compiled autograd, which traces hooks on gradients, so that ours do nothing."""

    def __init__(self) -> None:
        self._captures_before = _counted("compiled_autograd", "captures")
        self._logged = False

    def was_on(self) -> bool:
        """Whether it is on, or compiled a backward pass since this object was made; logged once."""
        config = getattr(sys.modules.get("torch._dynamo"), "config", None)
        inside = sys.modules.get("torch._dynamo.compiled_autograd")
        is_on = bool(
            getattr(config, "compiled_autograd", False)
            or getattr(inside, "compiled_autograd_enabled", False)
            or _counted("compiled_autograd", "captures") != self._captures_before
        )
        if is_on and not self._logged:
            self._logged = True
            log.warning(
                "telemetry: activation gradients are not measured: compiled autograd is on, which "
                "does not work with hooks on them"
            )
        return is_on


def graphs_compiled() -> int:
    """Return the number of graphs that torch.compile made in this process; 0 if not loaded."""
    return _counted("stats", "unique_graphs")


def _counted(of: str, what: str) -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = find(dynamo, "counters", "modules compiled before HookLogger are not recognized")
    return 0 if counters is None else int(counters[of][what])


def is_compiled(*modules: nn.Module) -> bool:
    """Whether ``module.compile()`` or ``torch.compile`` compiled one of these modules.

    False if only a function that calls it was compiled, or if the private name is missing.
    """
    of_module = [getattr(module, "_compiled_call_impl", None) for module in modules]
    return is_compiled_wrapper(*modules) or of_module.count(None) < len(of_module)


def is_compiled_wrapper(*modules: nn.Module) -> bool:
    """Whether ``torch.compile`` returned one of these modules."""
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = None if dynamo is None else find(dynamo, "OptimizedModule", "see graphs_compiled")
    return wrapper is not None and bool([m for m in modules if isinstance(m, wrapper)])


def drop_compiled_code() -> None:
    """Have torch.compile compile all code of this process again at its next call.

    Compiled code does not call hooks that were added afterwards.
    """
    if graphs_compiled() == 0:
        return
    reset = find(
        sys.modules.get("torch._dynamo"),
        "reset_code_caches",
        "hooks added to a model after it was compiled do nothing",
    )
    if reset is not None:
        reset()


class BeforeCompilations:
    """Calls ``callback`` before each compilation by torch.compile in this process.

    PyTorch holds a lock meanwhile. It compiles what a compiled function calls, and would wait for
    that lock forever if the callback were compiled, too.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        # PyTorch passes arguments that differ between versions.
        self._callback: Callable[..., None] = not_compiled(lambda *args: callback())

    def install(self) -> None:
        """Register the callback, also again after ``torch._dynamo.reset``, which removes all.

        Loads the compiler, as PyTorch does when it makes an optimizer.
        """
        with contextlib.suppress(ImportError):
            import_module("torch._dynamo")
        handler = self._handler()
        if handler is not None and self._callback not in handler.start_callbacks:
            handler.register_start_callback(self._callback)

    def remove(self) -> None:
        """Remove the callback. Idempotent."""
        handler = self._handler()
        if handler is not None and self._callback in handler.start_callbacks:
            handler.remove_start_callback(self._callback)

    def _handler(self) -> Any:
        dynamo = sys.modules.get("torch._dynamo")
        consequence = "modules that torch.compile has compiled show no activations"
        return None if dynamo is None else find(dynamo, "callback_handler", consequence)

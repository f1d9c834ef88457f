"""Private functions of ``torch.compile`` and ``torch.jit``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.torch_version import TorchVersion

from telemetry.torch_private import find

F = TypeVar("F", bound=Callable[..., Any])

# Before, what observes a graph is dropped from it, or fails at operations in place.
GRAPHS_CAN_BE_OBSERVED = TorchVersion(torch.__version__) >= "2.13"


def keep_in_graph(operator: torch._ops.OpOverload) -> bool:
    """Keep an operator without results, and the order of its calls, in compiled graphs.

    Returns:
        False if that is impossible. The compiler then drops it as dead code.
    """
    if not GRAPHS_CAN_BE_OBSERVED:
        return False
    from torch import _higher_order_ops

    effects = getattr(_higher_order_ops, "effects", None)
    loss = "modules that torch.compile has compiled show no activations"
    register = find(effects, "_register_effectful_op", loss)
    kinds = find(effects, "_EffectType", loss)
    if register is None or kinds is None:
        return False
    register(operator, kinds.ORDERED)
    return True


def not_compiled(function: F) -> F:
    """``function``, which the compiler then calls instead of tracing it. Does not load it."""
    disable = find(
        torch, "_disable_dynamo", "an optimizer whose step() is compiled is compiled with our hooks"
    )
    return function if disable is None else disable(function)


def graph_break(reason: str) -> Any:
    """A decorator of functions at which the compiler ends a graph; it says why

    Loads the compiler, unlike :func:`not_compiled`.
    """
    try:
        return torch.compiler.disable(reason=reason)
    except TypeError:  # before PyTorch 2.7 it takes no reason
        return torch.compiler.disable()


def backward_is_compiled() -> bool:
    """Whether compiled autograd is on. It traces hooks on gradients, and fails at ours."""
    config = getattr(sys.modules.get("torch._dynamo"), "config", None)
    return bool(getattr(config, "compiled_autograd", False))


def graphs_compiled() -> int:
    """How many graphs torch.compile has made in this process; 0 while it is not loaded."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0
    counters = find(dynamo, "counters", "modules compiled before HookLogger are not recognized")
    return 0 if counters is None else int(counters["stats"]["unique_graphs"])


def is_compiled(module: nn.Module) -> bool:
    """Whether this module itself was compiled, by ``module.compile()`` or ``torch.compile``.

    False if only a function that calls it was compiled, or if the private name is missing.
    """
    dynamo = sys.modules.get("torch._dynamo")
    wrapper = None if dynamo is None else find(dynamo, "OptimizedModule", "see graphs_compiled")
    if wrapper is not None and isinstance(module, wrapper):
        return True
    return getattr(module, "_compiled_call_impl", None) is not None


def drop_compiled_code() -> None:
    """Have everything that torch.compile has compiled in this process compiled again when called.

    Compiled code does not notice that modules got hooks afterwards, which then do nothing.
    """
    if graphs_compiled() == 0:
        return
    reset = find(
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

    It would compile forward hooks with the module, and fail at ours. It asks only modules whose
    class defines ``__prepare_scriptable__``, so ``nn.Module`` gets such a method.

    Returns:
        Ends this; after the last call, ``nn.Module`` is as before.
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

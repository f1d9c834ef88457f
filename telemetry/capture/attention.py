"""Observes the calls of ``scaled_dot_product_attention`` in a model's forward pass."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from telemetry.capture.hooks import CallObserver
from telemetry.torch_private import enter_function_mode, leave_function_mode


class AttentionMode(TorchFunctionMode):
    """Torch-function mode that is active during one call of the model.

    Dynamo guards compiled code by the active modes. So it must not be active where a compiled
    function is called. A fused kernel of ``nn.MultiheadAttention`` in evaluation mode is not used
    under a mode, either.
    """

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer
        self._model: nn.Module | None = None  # while it runs
        self._handle: RemovableHandle | None = None  # of the hook that ends it

    def enter(self, model: nn.Module) -> None:
        """Observe until the running call of ``model`` returns or raises. Idempotent.

        Not under ``torch.jit.trace``, which compares the source locations of two passes.
        """
        is_traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        if self._handle is None and not is_traced:
            leave_function_mode(self)  # another thread could not remove it from this one
            if enter_function_mode(self):
                self._model = model
                self._handle = register_module_forward_hook(self._on_return, always_call=True)

    def leave(self) -> None:
        """Stop observing. Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = self._model = None
            leave_function_mode(self)

    def _on_return(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._model:
            self.leave()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if "_stacklevel" in kwargs:  # of softmax and the like, which warn in a function they call
            kwargs = {**kwargs, "_stacklevel": kwargs["_stacklevel"] + _FRAMES}
        if self._handle is not None:
            if func is functional.scaled_dot_product_attention:
                func = self._attend
            elif func is functional.multi_head_attention_forward:
                func = self._with_own_attention(func)
        if isinstance(func, FunctionType) and "warnings" in func.__code__.co_names:
            func = _copy_of(func, warnings=_WARNINGS)
        return func(*args, **kwargs)

    def _attend(self, *args: Any, **keywords: Any) -> Tensor:
        output: Tensor = functional.scaled_dot_product_attention(*args, **keywords)
        self._observer.on_attention(args, keywords)
        return output

    def _with_own_attention(self, func: Any) -> Any:
        """Return a copy of a function whose calls of ``scaled_dot_product_attention`` are observed.

        The mode is not active inside of its handler. If it were, ``func`` would call the
        handler again, and not itself.
        """
        if not isinstance(func, FunctionType):
            return func
        return _copy_of(func, scaled_dot_product_attention=self._attend)


# Frames of the mode between a function and the call in the user's code: the handler, PyTorch's
# dispatch, and the function as it was called.
_FRAMES = 3


def _warn(message: Any, category: Any = None, stacklevel: int = 1, source: Any = None) -> None:
    """Warn at the code that warns without the mode."""
    beyond = _FRAMES if stacklevel > 1 else 0
    warnings.warn(message, category, stacklevel + beyond + 1, source)


_WARNINGS = SimpleNamespace(**{**vars(warnings), "warn": _warn})


def _copy_of(function: FunctionType, **names: Any) -> FunctionType:
    """Return a copy of a function in which some global names have other values."""
    names, code = {**function.__globals__, **names}, function.__code__
    copy = FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy

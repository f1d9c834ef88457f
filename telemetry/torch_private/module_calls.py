"""Private names of PyTorch for hooks around module calls, and for frames of the call stack."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from torch import nn
from torch.nn.modules import module as nn_module
from torch.utils.hooks import RemovableHandle

from telemetry.torch_private import callers, find

# Calls between a module's own call and :func:`keywords_of_call`.
_MAX_FRAMES_ABOVE_CALL = 4


class AroundModuleCalls:
    """Calls ``before(module, args)`` and ``after(module, args, output)`` around any module's calls.

    Hooks on the modules themselves change PyTorch's behavior: ``nn.TransformerEncoderLayer`` takes
    its fused path only without, ``make_graphed_callables`` refuses them, ``torch.jit.script``
    compiles them, quantization moves them to other modules, copies and pickles contain them.
    """

    def __init__(
        self,
        before: Callable[[nn.Module, Any], None],
        after: Callable[[nn.Module, Any, Any], None],
        compiler_comes: Callable[[], None],
    ) -> None:
        self._before, self._after, self._compiler_comes = before, after, compiler_comes
        self._handles: list[RemovableHandle] = []

    def install(self) -> None:
        """Register the hooks. Idempotent."""
        if not self._handles:
            for register, hook in (
                (nn_module.register_module_forward_pre_hook, self._before),
                (nn_module.register_module_forward_hook, self._after),
                (nn_module.register_module_module_registration_hook, self._on_registered),
            ):
                self._handles.append(register(hook))
            _quieten(*self._handles)

    def _on_registered(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        """Call back when the compiler wraps a module: strict export fails with global hooks."""
        if type(module).__module__.startswith("torch._dynamo"):
            self._compiler_comes()

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            _remove(self._handles[-1])  # before it is forgotten, as Ctrl-C may raise anywhere
            self._handles.pop()


class ArmedPreHook:
    """Calls ``before(module, args)`` before the calls of any module, while it is armed.

    :meth:`arm` and :meth:`disarm` take a tenth of a microsecond: they are called at each step.
    """

    def __init__(self, before: Callable[[nn.Module, Any], None]) -> None:
        self._before = before
        self._handle: RemovableHandle | None = None
        self._hooks: Any = {}
        self._retired = False

    @property
    def is_armed(self) -> bool:
        return self._handle is not None and self._handle.id in self._hooks

    def arm(self) -> None:
        """Call back from here on. Idempotent."""
        if self._retired:
            return
        if self._handle is None:
            self._handle = nn_module.register_module_forward_pre_hook(self._before)
            self._hooks = self._handle.hooks_dict_ref()
            _quieten(self._handle)
        self._hooks[self._handle.id] = self._before

    def disarm(self) -> None:
        """Call back no more. Idempotent."""
        if self._handle is not None:
            self._hooks.pop(self._handle.id, None)

    def retire(self) -> None:
        """Disarm, and ignore :meth:`arm` until :meth:`remove`."""
        self.remove()
        self._retired = True

    def remove(self) -> None:
        """Disarm, and forget the hook. Idempotent."""
        self._retired = False
        if self._handle is not None:
            _remove(self._handle)
            self._handle = None


# A model wrapped by ``torch.compile`` calls this to warn that hooks are called for the wrapper,
# too. Ours ignore the wrapper, so the warning would mislead.
_ASKED = "_has_any_global_hook"
_has_any_global_hook = getattr(nn_module, _ASKED, None)
_quiet: set[int] = set()  # numbers of our hooks


def _quieten(*handles: RemovableHandle) -> None:
    for handle in handles:
        _quiet.add(handle.id)
    if _has_any_global_hook is not None:
        setattr(nn_module, _ASKED, _has_any_other_global_hook)


def _remove(handle: RemovableHandle) -> None:
    handle.remove()
    _quiet.discard(handle.id)
    if not _quiet and getattr(nn_module, _ASKED, None) is _has_any_other_global_hook:
        setattr(nn_module, _ASKED, _has_any_global_hook)


def _has_any_other_global_hook() -> bool:
    kinds = ("_global_forward", "_global_backward")
    hooks = (value for name, value in vars(nn_module).items() if name.startswith(kinds))
    return not _quiet.issuperset(itertools.chain(*hooks))


class AfterModeChanges:
    """Calls ``callback(layer)`` after ``train`` or ``eval`` of an ``nn.TransformerEncoderLayer``.

    For hooks that have to be on its modules, which prevent its fused path in evaluation mode. The
    class gets its own ``train`` until the last callback is removed.
    """

    _callbacks: ClassVar[list[Callable[[nn.Module], None]]] = []

    def __init__(self, callback: Callable[[nn.Module], None]) -> None:
        self._callback = callback

    def install(self) -> None:
        """Register the hooks. Idempotent."""
        if self._callback not in self._callbacks:
            self._callbacks.append(self._callback)
            nn.TransformerEncoderLayer.train = _train  # type: ignore[method-assign,assignment]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        if self._callback in self._callbacks:
            self._callbacks.remove(self._callback)
            if not self._callbacks and vars(nn.TransformerEncoderLayer).get("train") is _train:
                del nn.TransformerEncoderLayer.train


def _train(layer: nn.Module, mode: bool = True) -> nn.Module:
    nn.Module.train(layer, mode)
    for callback in AfterModeChanges._callbacks:
        callback(layer)
    return layer


def keywords_of_call() -> dict[str, Any]:
    """Return a module's keyword arguments, in the ``before`` of :class:`AroundModuleCalls`.

    PyTorch does not pass them to hooks, so they are read from the call stack.
    """
    for frame in callers(_MAX_FRAMES_ABOVE_CALL):
        if frame.f_globals is vars(nn_module) and "kwargs" in frame.f_locals:
            return dict(frame.f_locals["kwargs"])
    return {}


def running_modules() -> Iterator[nn.Module]:
    """Yield the modules whose calls this thread is in, the innermost first."""
    call = find(nn.Module, "_call_impl", "attention is not measured")
    frame = None if call is None else sys._getframe(1)
    while frame is not None:
        if frame.f_code is call.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back

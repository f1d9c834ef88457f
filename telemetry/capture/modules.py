"""Which modules are watched: puts hooks on them for the steps that need them."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn

from telemetry.capture.hooks import (
    CONVOLUTIONS,
    ForwardHook,
    InputHook,
    ModuleHook,
    Receiver,
    is_inert_copy,
)
from telemetry.capture.no_step import NEVER_RAN
from telemetry.capture.silence import explain_silence
from telemetry.capture.watch import Watch
from telemetry.capture.window import Window
from telemetry.selection import cleaned, evenly
from telemetry.torch_private.compiler import before_scripting, graphs_compiled

log = logging.getLogger("telemetry")

PICTURED_MODULES = 12
"""Convolutions whose feature maps are drawn; more are thinned evenly over the depth."""


class WatchedModules:
    """Puts hooks on the watched modules of a model.

    Attributes:
        pictured: Names of the modules whose feature maps are drawn.
        installed: Whether there are hooks that are to go after the step.
    """

    def __init__(self, watch: Watch) -> None:
        self.pictured: frozenset[str] = frozenset()
        self._watch = watch
        self._input_hook: InputHook | None = None
        self._forward_hooks: dict[str, ForwardHook] = {}
        self.installed = False
        self._seen: dict[str, int] = {}
        self._graphs_before = graphs_compiled()
        self._silence_explained = False
        self._end_scripting: Callable[[], None] | None = None

    def install(self, receiver: Receiver) -> None:
        """Put hooks on the modules that are watched now, and take them off all others.

        They do nothing until the receiver's switch is turned on.
        """
        model = self._watch.model()
        if model is None:
            return
        self._end_scripting = self._end_scripting or before_scripting(_leave)
        self._input_hook = self._input_hook or InputHook(self._watch, receiver, model)
        self._input_hook.install()
        if self._forward_hooks and not self.changed():
            for hook in self._forward_hooks.values():
                hook.install()
        else:
            self._choose(receiver, model)
        self.installed = True

    def _choose(self, receiver: Receiver, model: nn.Module) -> None:
        """Look which modules are watched, and which of them are pictured."""
        watched = cleaned(self._watch.selection.apply(model).items())
        before = {hook.module(): hook for hook in self._forward_hooks.values()}
        self._forward_hooks = {}
        self._seen = _identities(model)
        for name, module in watched.items():
            if isinstance(module, torch.jit.ScriptModule):
                self._watch.failures.log_once(
                    "modules that torch.jit has compiled take no hooks, nothing is "
                    "logged for their outputs"
                )
                continue
            hook = before.pop(module, None) or ForwardHook(self._watch, receiver, name, module)
            hook.rename(name)
            hook.install()
            self._forward_hooks[name] = hook
        for hook in before.values():
            hook.remove()
        convolutions = [n for n, m in watched.items() if isinstance(m, CONVOLUTIONS)]
        drawn = evenly(convolutions, PICTURED_MODULES) if self._watch.content.images else []
        self.pictured = frozenset(drawn)

    def changed(self) -> bool:
        """Whether the model has other modules than when hooks were put on them."""
        model = self._watch.model()
        if model is None:
            return False
        # What has taken the place of a module that is gone may have its identity.
        gone = None in [hook.module() for hook in self._forward_hooks.values()]
        return gone or self._seen != _identities(model)

    def uninstall(self) -> None:
        """Take hooks off again, but for modules in compiled graphs, which look at the switch.

        A graph that is compiled while no hook is there would never show anything. So once
        something has been compiled, hooks stay on modules that have not run outside of a graph.
        """
        if not self.installed:
            return
        self.installed = False
        if self._input_hook is not None:
            self._input_hook.remove()
        compiling = graphs_compiled() != self._graphs_before
        for hook in self._forward_hooks.values():
            if not hook.traced and (hook.ran_eagerly or not compiling):
                hook.remove()

    def remove(self) -> None:
        """Take all hooks off; harmless when done twice."""
        if self._end_scripting is not None:
            self._end_scripting()
            self._end_scripting = None
        for hook in (self._input_hook, *self._forward_hooks.values()):
            if hook is not None:
                hook.remove()
        self._forward_hooks = {}

    def how_they_ran(self, window: Window) -> str:
        """What is known of the forward passes in a step without a backward pass, for a message."""
        if window.order:
            return "the model ran, but no backward pass has reached its parameters"
        if self._watch.model() is None:
            return "the model is gone: HookLogger does not keep it alive"
        if not window.full:
            return "no backward pass followed"
        if any(hook.ran_eagerly for hook in self._on_modules().values()):
            return "the model ran in evaluation mode, without gradients or on another thread only"
        return NEVER_RAN

    def explain_silence(self, window: Window) -> None:
        """Name, once, the watched modules that did not run in the first full step."""
        model = self._watch.model()
        if self._silence_explained or model is None or not self._watch.content.activations:
            return
        self._silence_explained = True
        trained = self._watch.table.owners(window.indices())
        level, message = explain_silence(model, self._on_modules(), window, trained)
        if message:
            self._watch.failures.log_once(message, level=level)

    def _on_modules(self) -> dict[str, ForwardHook]:
        """The hooks that are on a module, by its name."""
        return {name: hook for name, hook in self._forward_hooks.items() if hook.installed}


def _leave(module: nn.Module) -> None:
    """Take our hooks off a module that is about to be scripted, which would compile them, too.

    They are back at the next step that is measured.
    """
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(hook, ModuleHook):
                hook.remove()
            elif is_inert_copy(hook):
                del hooks[key]
            if isinstance(hook, ForwardHook):
                log.info(
                    "telemetry: %s is being scripted, which would compile hooks, too; it is "
                    "watched again from the next step that is measured",
                    hook.called,
                )


def _identities(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules()}

"""The hooks on watched modules."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from telemetry.capture.attention import AttentionMode
from telemetry.capture.context import Context
from telemetry.capture.experts import routers
from telemetry.capture.hooks import CallObserver, ForwardHook, InputHook, ResultHook
from telemetry.capture.missing_modules import missing_modules, unregistered_modules
from telemetry.capture.optimizers import NEVER_RAN
from telemetry.capture.step import FullStep, Step
from telemetry.selection import cleaned, evenly, owners
from telemetry.torch_private import undisturbed
from telemetry.torch_private.compiler import (
    BeforeCompilations,
    graphs_compiled,
    is_compiled,
)
from telemetry.torch_private.module_calls import (
    AfterModeChanges,
    AroundModuleCalls,
    running_modules,
)

# Convolutions whose feature maps are drawn; of more, evenly spaced ones are chosen.
PICTURED_MODULES = 12

# Measured calls of a model in which attention is looked for, unless a class is named after it. The
# mode takes some microseconds of each operation.
_CALLS_WITHOUT_ATTENTION = 10

# In evaluation mode and without gradients, one kernel computes the whole module.
_WITH_FAST_PATH = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class WatchedModules:
    """The hooks of the watched modules of a model."""

    def __init__(
        self,
        context: Context,
        observer: CallObserver,
        before_compilation: Callable[[], None],
    ) -> None:
        self._context, self._observer = context, observer
        self._compiler_comes = before_compilation
        self._calls = AroundModuleCalls(self._before, self._after, self._before_compilation)
        self._compilations = BeforeCompilations(self._before_compilation)
        self._modes = AfterModeChanges(self._mode_changed)
        self._attention = AttentionMode(observer)
        self._callers: dict[int, str] = {}  # names of the modules whose attention is measured
        self._has_attention, self._calls_without = False, 0
        self._set_aside: set[ForwardHook] = set()  # while their layers are in evaluation mode
        model = context.model()
        assert model is not None
        self._input_hook = InputHook(observer, context, model)
        self._result_hook = ResultHook(observer, context, "", model)
        self._hooks: dict[str, ForwardHook] = {}
        self._by_identity: dict[int, ForwardHook] = {}  # of their modules
        self._identities: dict[str, int] = {}  # of all modules, when the watched ones were chosen
        self._observing = False
        self._graphs_before = graphs_compiled()
        self._missing_logged = False

    def attach(self) -> None:
        """Request a call before each compilation, to install hooks: later ones are not compiled."""
        self._compilations.install()

    def observe(self) -> None:
        """Observe the calls of watched modules, chosen again if the model has changed."""
        self._compilations.install()
        if not self._hooks or self.changed():
            self._choose()
        self._observing = True
        if self._compiling():
            self._install()
        else:
            self._calls.install()

    def stop(self) -> None:
        """Stop observing. Hooks in compiled graphs stay; they check whether to measure.

        A graph that is compiled without hooks has no observers. So once something has been
        compiled, hooks stay on modules that have not run outside of a graph.
        """
        if not self._observing:
            return
        self._observing = False
        self._attention.leave()
        self._calls.remove()
        self._input_hook.remove()
        compiling = self._compiling()
        for hook in self._hooks.values():
            if not hook.traced and (hook.ran_eagerly or not compiling):
                self._set_aside.discard(hook)
                if hook.handle is not None:
                    hook.remove()

    def detach(self) -> None:
        """Remove all hooks; idempotent."""
        self.stop()
        self._compilations.remove()
        self._modes.remove()
        self._set_aside.clear()
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._by_identity = {}, {}

    def _compiling(self) -> bool:
        return graphs_compiled() != self._graphs_before

    def _install(self) -> None:
        """Put hooks on the modules: graphs with such hooks are valid without global ones only."""
        self._calls.remove()
        if self._observing:
            self._input_hook.install()
        for hook in self._hooks.values():
            # On other modules they would slow down steps that are not measured.
            if self._observing or hook.traced or not hook.ran_eagerly:
                hook.install()
        model = self._context.model()
        for layer in () if model is None else model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                self._modes.install()
                self._mode_changed(layer)

    # --- attention --------------------------------------------------------------------------------

    def observe_attention(self) -> None:
        """Observe the attention of the model's call that has begun, where that changes nothing."""
        model = self._context.model()
        if model is None or not (self._observing and self._context.content.activations):
            return
        if not self._has_attention and self._calls_without >= _CALLS_WITHOUT_ATTENTION:
            return
        self._calls_without += 1
        modules = list(model.modules())
        reason = ""
        if self._compiling() or is_compiled(*modules):
            reason = "torch.compile has compiled a module or a function"
        elif any(map(_may_be_fused, [m for m in modules if isinstance(m, _WITH_FAST_PATH)])):
            reason = "frozen modules with a fused path would leave it"
        if not reason:
            self._attention.enter(model)
        elif self._has_attention:
            self._context.guard.failures.log_once(
                f"the logits and the entropy of attention are not measured: {reason}",
                level=logging.INFO,
            )

    def calling_module(self) -> str | None:
        """Return the name of the selected module that calls attention; None without one."""
        self._has_attention = True
        names = (self._callers.get(id(module)) for module in running_modules())
        return next((name for name in names if name is not None), None)

    # --- what PyTorch calls -----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._context.armed:
            return
        if module is self._input_hook.module():
            self._input_hook(module, args)
        if module._forward_hooks:  # the user's hook disables the module's fast path anyway
            hook = self._by_identity.get(id(module))
            if hook is not None and hook.module() is module:
                hook.install(for_one_call=True)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        hook = self._by_identity.get(id(module))
        if hook is None and self._context.selection.modules is None:
            hook = self._result_hook  # ignores other modules
        if hook is not None and hook.handle is None:
            hook.observe(module, args, output)

    def _mode_changed(self, layer: nn.Module) -> None:
        hooks = (self._by_identity.get(id(module)) for module in layer.modules())
        for hook in (hook for hook in hooks if hook is not None):
            if layer.training and hook in self._set_aside:
                self._set_aside.remove(hook)
                hook.install()
            elif not layer.training and hook.handle is not None:
                self._set_aside.add(hook)
                hook.remove()

    def _before_compilation(self) -> None:
        self._attention.leave()
        with self._context.guard.failures.contained("to attach its hooks"):
            self._compiler_comes()
            if not self._hooks or self.changed():
                self._choose()
            self._install()

    # --- which modules ----------------------------------------------------------------------------

    def _choose(self) -> None:
        """Choose which modules are watched, and which of them are pictured."""
        model = self._context.model()
        if model is None:
            return
        watched = cleaned(self._context.selection.apply(model).items())
        before = {hook.module(): hook for hook in self._hooks.values()}
        self._hooks, self._by_identity = {}, {}
        self._identities = _identities(model)
        callers = cleaned(self._context.selection.callers(model).items())
        self._callers = {id(module): name for name, module in callers.items()}
        types = {type(module).__name__.lower() for module in model.modules()}
        self._has_attention, self._calls_without = any("attention" in n for n in types), 0
        for name, module in watched.items():
            if isinstance(module, torch.jit.ScriptModule):
                self._context.guard.failures.log_once(
                    "modules that torch.jit has compiled take no hooks, so their activations are "
                    "missing; gradients and weights are logged"
                )
                continue
            hook = before.pop(module, None) or ForwardHook(
                self._observer, self._context, name, module
            )
            hook.rename(name)
            self._hooks[name] = hook
            self._by_identity[id(module)] = hook
        for hook in before.values():
            hook.remove()
        convolutions = [name for name, hook in self._hooks.items() if hook.convolves]
        drawn = evenly(convolutions, PICTURED_MODULES) if self._context.content.images else []
        of_experts = routers(model)
        for name, hook in self._hooks.items():
            hook.pictured, hook.router = name in drawn, of_experts.get(id(watched[name]))

    def changed(self) -> bool:
        """Whether the model has other modules than when the watched ones were chosen."""
        model = self._context.model()
        if model is None:
            return False
        # A new module may have the identity of one that was deleted.
        is_deleted = None in [hook.module() for hook in self._hooks.values()]
        return is_deleted or self._identities != _identities(model)

    def how_they_ran(self, step: Step) -> str:
        """Describe the forward passes in a step without a backward pass, for a log message."""
        if isinstance(step, FullStep) and step.forward.order:
            return "the model ran, but no backward pass has reached its parameters"
        if self._context.model() is None:
            return "the model was deleted: HookLogger does not keep it alive"
        if not step.full:
            return "no backward pass followed"
        if any(hook.ran_eagerly for hook in self._hooks.values()):
            return "the model ran in evaluation mode, without gradients or on another thread only"
        return NEVER_RAN

    @undisturbed(always=True)
    def log_missing(self, step: FullStep) -> None:
        """Log, once, which modules did not run in the first full step or are not registered."""
        model, failures = self._context.model(), self._context.guard.failures
        if self._missing_logged or step.phase or model is None:
            return
        self._missing_logged = True
        if not self._context.content.activations:
            return
        if not self._hooks and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
            return  # logged when they were chosen
        trained = {owner for name in step.with_gradients() for owner in owners(name)}
        ran, number = step.forward.order, step.step
        level, message = missing_modules(model, self._hooks, ran, number, trained)
        if message:
            failures.log_once(message, level=level)
        if message := unregistered_modules(model):
            failures.log_once(message)


def _may_be_fused(module: nn.Module) -> bool:
    return not (module.training and any(p.requires_grad for p in module.parameters()))


def _identities(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules()}

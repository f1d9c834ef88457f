"""The hooks on watched modules, and the reasons why modules are not measured."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from telemetry.capture.attention import AttentionMode
from telemetry.capture.context import Context
from telemetry.capture.experts import routers
from telemetry.capture.hooks import CallObserver, ForwardHook, InputHook, ResultHook
from telemetry.capture.optimizers import NEVER_RAN
from telemetry.capture.step import FullStep, Step
from telemetry.plain_text import called_all
from telemetry.records.step import is_inside
from telemetry.selection import clean_name, cleaned, evenly, owners
from telemetry.torch_private import undisturbed
from telemetry.torch_private.compiler import (
    GRAPHS_CAN_BE_OBSERVED,
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


# --- modules that are not measured ----------------------------------------------------------------

_NAMES_IN_MESSAGE = 8

_COMPILED = (
    "compiled before HookLogger was made: make HookLogger before the first compiled call, or call "
    "torch._dynamo.reset_code_caches() once after making it, or train the logged steps under "
    'torch.compiler.set_stance("force_eager")'
    if GRAPHS_CAN_BE_OBSERVED
    else f"compiled: PyTorch {torch.__version__} cannot show what happens inside, 2.13 can. Update "
    "it, or train the logged steps without torch.compile"
)


def missing_modules(
    model: nn.Module,
    watched: Mapping[str, ForwardHook],
    ran: Collection[str],
    step: int,
    trained: Collection[str],
) -> tuple[int, str]:
    """Return level and message about watched modules that did not run in a full step.

    The message omits modules without parameters: many run at random, or only where they have an
    effect. ``trained``: modules that contain a parameter with a gradient.
    """
    missed = {name: hook for name, hook in watched.items() if name not in ran}
    # Neither Python nor a compiled graph has called their hooks.
    uncalled = [n for n, h in missed.items() if n in trained and not (h.ran_eagerly or h.traced)]
    if len(missed) == len(watched):
        message = f"no watched module was seen running at step {step}, so activations are missing"
        return logging.WARNING, f"{message}. {_why_none(model, missed, uncalled)}"
    compiled = [clean_name(n) for n, m in model.named_modules() if is_compiled(m)]
    in_graphs = [n for n in missed if any(is_inside(n, p) for p in compiled)]
    if not set(uncalled).isdisjoint(in_graphs):
        message = _did_not_run(in_graphs, len(watched), step)
        return logging.WARNING, f"{message}. They were {_COMPILED}"
    modules = {n: hook.module() for n, hook in missed.items()}
    with_parameters = [n for n, m in modules.items() if m is not None and [*m.parameters()]]
    return logging.INFO, _did_not_run(with_parameters, len(watched), step)


def unregistered(model: nn.Module, *, trained: bool = False) -> list[str]:
    """Return the attributes that hold modules in plain lists and dicts, which PyTorch ignores.

    Only those with parameters that the model does not have; ``trained``: and that have gradients.
    """
    known, attributes = set(map(id, model.parameters())), []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            parts = list(value.values()) if type(value) is dict else value
            if type(parts) not in (list, tuple):
                continue
            modules = [part for part in parts if isinstance(part, nn.Module)]
            inside = [p for part in modules for p in part.parameters() if id(p) not in known]
            if any(p.grad is not None for p in inside) if trained else inside:
                attributes.append(clean_name(f"{name}.{attribute}" if name else attribute))
    return attributes


def unregistered_modules(model: nn.Module) -> str:
    """Return the message about modules in plain lists and dicts that have gradients."""
    if not (attributes := unregistered(model, trained=True)):
        return ""
    return (
        f"modules in {called_all(attributes, _NAMES_IN_MESSAGE)} get gradients and are not "
        "registered in the model: an optimizer that is given model.parameters() does not move "
        "them, and nothing is logged for them. Keep them in a torch.nn.ModuleList or ModuleDict"
    )


def _why_none(model: nn.Module, missed: Mapping[str, ForwardHook], uncalled: Sequence[str]) -> str:
    if any(base.__module__.partition(".")[0] == "keras" for base in type(model).__mro__):
        return (
            "Keras keeps the layers of such a model where PyTorch does not look for them: make "
            "layers = torch.nn.ModuleList(model.layers) and give HookLogger that for the model"
        )
    if any(hook.ran_eagerly for hook in missed.values()):
        return "The model was not in training mode, or ran without gradients or on another thread"
    if uncalled and graphs_compiled() > 0:
        return f"Python called no module. If a function or a model was {_COMPILED}"
    return "Python called no module, only forward() or a function, or another model was trained"


def _did_not_run(names: Sequence[str], watched: int, step: int) -> str:
    if not names:
        return ""
    return (
        f"{len(names)} of {watched} watched modules did not run at step {step}, nothing is "
        f"logged for their outputs: {called_all(names, _NAMES_IN_MESSAGE)}"
    )

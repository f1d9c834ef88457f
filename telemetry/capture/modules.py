"""Which modules are watched, with hooks for steps that need them; which are shown, or unseen."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from telemetry.capture.code import places_in_code
from telemetry.capture.hooks import ForwardHook, InputHook
from telemetry.capture.step import Step
from telemetry.capture.unseen import NEVER_RAN
from telemetry.plain_text import called_all
from telemetry.records import Layout, Module, Parameter
from telemetry.records.step import is_inside
from telemetry.selection import Selection, clean_name, cleaned, evenly, owners
from telemetry.torch_private import AfterModeChanges, AroundModuleCalls
from telemetry.torch_private.compiler import (
    GRAPHS_CAN_BE_OBSERVED,
    BeforeCompilations,
    graphs_compiled,
    is_compiled,
)

if TYPE_CHECKING:
    from telemetry.capture.capture import Capture

# Convolutions whose feature maps are drawn; more are thinned evenly over the depth.
PICTURED_MODULES = 12

_NAMED_AT_MOST = 8

_COMPILED = (
    "compiled before HookLogger was made: make HookLogger before the first compiled call, or call "
    "torch._dynamo.reset_code_caches() once after making it, or train the logged steps under "
    'torch.compiler.set_stance("force_eager")'
    if GRAPHS_CAN_BE_OBSERVED
    else f"compiled: PyTorch {torch.__version__} cannot show what happens inside, 2.13 can. Update "
    "it, or train the logged steps without torch.compile"
)


class WatchedModules:
    """Has the calls of the watched modules of a model observed."""

    def __init__(self, capture: Capture, model: nn.Module, selection: Selection) -> None:
        self.pictured: frozenset[str] = frozenset()  # names of those whose feature maps are drawn
        self.forward_order: dict[str, None] = {}  # names of those that have run, by first calls
        self._capture = capture
        self._selection = selection
        self._calls = AroundModuleCalls(self._before, self._after, self._compiler_comes)
        self._compilations = BeforeCompilations(self._compiler_comes)
        self._modes = AfterModeChanges(self._mode_changed)
        self._set_aside: set[ForwardHook] = set()  # while their layers are in evaluation mode
        self._input_hook = InputHook(capture, model)
        self._forward_hooks: dict[str, ForwardHook] = {}
        self._by_identity: dict[int, ForwardHook] = {}  # the same, of modules
        self._identities: dict[str, int] = {}  # of all modules, when it was chosen what to watch
        self._observing = False
        self._graphs_before = graphs_compiled()
        self._unseen_told = False
        self._layout = self._make_layout(model, capture.table.parameters)

    def attach(self) -> None:
        """Be there when a model is compiled: without hooks it would never show anything."""
        self._compilations.install()

    def observe(self) -> None:
        """Observe the calls of the modules that are watched now."""
        self._compilations.install()
        if not self._forward_hooks or self.changed():
            self._choose()
        self._observing = True
        if self._compiling():
            self._install()
        else:
            self._calls.install()

    def stop(self) -> None:
        """Observe no more calls, but in compiled graphs, which check whether a step is measured.

        A graph that is compiled while no hook is there would never show anything. So once
        something has been compiled, hooks stay on modules that have not run outside of a graph.
        """
        if not self._observing:
            return
        self._observing = False
        self._calls.remove()
        self._input_hook.remove()
        compiling = self._compiling()
        for hook in self._forward_hooks.values():
            if not hook.traced and (hook.ran_eagerly or not compiling):
                hook.remove()
                self._set_aside.discard(hook)

    def detach(self) -> None:
        """Leave nothing behind; harmless when done twice."""
        self._observing = False
        self._compilations.remove()
        self._modes.remove()
        self._set_aside.clear()
        self._calls.remove()
        for hook in (self._input_hook, *self._forward_hooks.values()):
            hook.remove()
        self._forward_hooks, self._by_identity = {}, {}

    def _compiling(self) -> bool:
        return graphs_compiled() != self._graphs_before

    def _install(self) -> None:
        """Put hooks on the modules: graphs that contain such are valid without global ones only."""
        self._calls.remove()
        if self._observing:
            self._input_hook.install()
        for hook in self._forward_hooks.values():
            # Elsewhere they would make steps slower that are not measured.
            if self._observing or hook.traced or not hook.ran_eagerly:
                hook.install()
        model = self._capture.model()
        for layer in () if model is None else model.modules():
            if isinstance(layer, nn.TransformerEncoderLayer):
                self._modes.install()
                self._mode_changed(layer)

    # --- what PyTorch calls -----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._capture.armed:
            return
        if module is self._input_hook.module():
            self._input_hook(module, args)
        # Whoever looks for hooks finds those of others anyway.
        hook = self._by_identity.get(id(module))
        if hook is not None and hook.module() is module and module._forward_hooks:
            hook.install(for_one_call=True)

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        hook = self._by_identity.get(id(module))
        if hook is not None and not hook.installed:
            hook(module, args, output)

    def _mode_changed(self, layer: nn.Module) -> None:
        found = (self._by_identity.get(id(module)) for module in layer.modules())
        for hook in (hook for hook in found if hook is not None):
            if layer.training and hook in self._set_aside:
                self._set_aside.remove(hook)
                hook.install()
            elif not layer.training and hook.installed:
                self._set_aside.add(hook)
                hook.remove()

    def _compiler_comes(self) -> None:
        with self._capture.guard.failures.contained("to attach its hooks"):
            if not self._forward_hooks or self.changed():
                self._choose()
            self._install()

    # --- which modules ----------------------------------------------------------------------------

    def _choose(self) -> None:
        """Look which modules are watched, and which of them are pictured."""
        model = self._capture.model()
        if model is None:
            return
        watched = cleaned(self._selection.apply(model).items())
        before = {hook.module(): hook for hook in self._forward_hooks.values()}
        self._forward_hooks, self._by_identity = {}, {}
        self._identities = _identities(model)
        for name, module in watched.items():
            if isinstance(module, torch.jit.ScriptModule):
                self._capture.guard.failures.log_once(
                    "modules that torch.jit has compiled take no hooks, so their activations are "
                    "missing; gradients and weights are logged"
                )
                continue
            hook = before.pop(module, None) or ForwardHook(self._capture, name, module)
            hook.rename(name)
            self._forward_hooks[name] = hook
            self._by_identity[id(module)] = hook
        for hook in before.values():
            hook.remove()
        convolutions = [name for name, hook in self._forward_hooks.items() if hook.convolves]
        drawn = evenly(convolutions, PICTURED_MODULES) if self._capture.content.images else []
        self.pictured = frozenset(drawn)

    def pictured_modules(self) -> dict[str, nn.Module]:
        """Those whose feature maps are drawn, by name."""
        found = [(name, hook.module()) for name, hook in self._forward_hooks.items()]
        return {n: module for n, module in found if n in self.pictured and module is not None}

    def changed(self) -> bool:
        """Whether the model has other modules than when hooks were put on them."""
        model = self._capture.model()
        if model is None:
            return False
        # What has taken the place of a module that is gone may have its identity.
        gone = None in [hook.module() for hook in self._forward_hooks.values()]
        return gone or self._identities != _identities(model)

    def how_they_ran(self, step: Step) -> str:
        """What is known of the forward passes in a step without a backward pass, for a message."""
        if step.order:
            return "the model ran, but no backward pass has reached its parameters"
        if self._capture.model() is None:
            return "the model is gone: HookLogger does not keep it alive"
        if not step.full:
            return "no backward pass followed"
        if any(hook.ran_eagerly for hook in self._forward_hooks.values()):
            return "the model ran in evaluation mode, without gradients or on another thread only"
        return NEVER_RAN

    def tell_unseen(self, step: Step) -> None:
        """Name, once, modules that did not run in the first full step or that nobody watches."""
        model, failures = self._capture.model(), self._capture.guard.failures
        if self._unseen_told or model is None or not self._capture.content.activations:
            return
        self._unseen_told = True
        parameters = self._capture.table.parameters
        stepped = [parameters[index].name for index in step.captured.stepped()]
        trained = {owner for parameter in stepped for owner in owners(parameter)}
        hooks, order = self._forward_hooks, step.order
        if not hooks and any(isinstance(m, torch.jit.ScriptModule) for m in model.modules()):
            return  # said where they were chosen
        level, message = _modules_unseen(model, hooks, order, step.number, trained)
        if message:
            failures.log_once(message, level=level)
        if message := _modules_hidden(model):
            failures.log_once(message)

    # --- what is shown ---------------------------------------------------------------------------

    def layout(self, ran: Collection[str] = (), parameters: tuple[Parameter, ...] = ()) -> Layout:
        """The same one until parameters are replaced or a module runs for the first time.

        ``ran``: modules in the order in which they ran; one that never did follows the module
        before it in ``named_modules()``. ``parameters``: of the step, if they may not be those of
        now.
        """
        parameters = parameters or self._capture.table.parameters
        new = [name for name in ran if name not in self.forward_order] if ran else ()
        if new or self._any_gone or self._layout.parameters is not parameters:
            model = self._capture.model()
            if model is not None:
                self.forward_order.update(dict.fromkeys(new))
                self._layout = self._make_layout(model, parameters, ran)
        return self._layout

    def load_forward_order(self, order: Iterable[str]) -> None:
        """Take the order from an earlier part of the run."""
        model = self._capture.model()
        if model is not None:
            known = cleaned(model.named_modules())
            self.forward_order = dict.fromkeys(name for name in order if name in known)
            self._layout = self._make_layout(model, self._capture.table.parameters)

    def _make_layout(
        self, model: nn.Module, parameters: tuple[Parameter, ...], ran: Collection[str] = ()
    ) -> Layout:
        found = cleaned(model.named_modules())
        modules = {name: type(module).__name__ for name, module in found.items()}
        places = places_in_code(found)
        shown = set(cleaned(self._selection.apply(model).items()))
        recorded = shown.union(ran, (p.module_name for p in parameters if p.recorded))
        # What the step has of layers that are gone since belongs to it.
        used = [*ran, *(parameter.module_name for parameter in parameters)]
        self._any_gone = not modules.keys() >= set(used)
        modules.update((name, "") for name in used if name not in modules)
        shown.update(used)
        depth = {name: index for index, name in enumerate(self.forward_order)}
        last = -1
        for name in modules:
            last = depth.setdefault(name, last)
        described = []
        for name in sorted((n for n in modules if n in shown), key=depth.__getitem__):
            kind, (forward, user_code) = modules[name], places.get(name, ("", None))
            described.append(
                Module(
                    name=name,
                    type_name=kind,
                    forward=forward,
                    user_code=user_code,
                    recorded=name in recorded,
                )
            )
        return Layout(modules=tuple(described), parameters=parameters)


def _identities(model: nn.Module) -> dict[str, int]:
    return {name: id(module) for name, module in model.named_modules()}


# --- what was not seen ----------------------------------------------------------------------------


def _modules_unseen(
    model: nn.Module,
    watched: Mapping[str, ForwardHook],
    ran: Collection[str],
    step: int,
    trained: Collection[str],
) -> tuple[int, str]:
    """The level and the message, if any, about watched modules that did not run in a full step.

    Modules without parameters are left out: many only run at random, or where they do something.
    ``trained`` are the modules that contain a parameter that got a gradient.
    """
    silent = {name: hook for name, hook in watched.items() if name not in ran}
    # Neither Python nor a compiled graph has called their hooks.
    uncalled = [n for n, h in silent.items() if n in trained and not (h.ran_eagerly or h.traced)]
    if len(silent) == len(watched):
        message = f"no watched module was seen running at step {step}, so activations are missing"
        return logging.WARNING, f"{message}. {_why_none(model, silent, uncalled)}"
    compiled = [clean_name(n) for n, m in model.named_modules() if is_compiled(m)]
    in_graphs = [n for n in silent if any(is_inside(n, p) for p in compiled)]
    if not set(uncalled).isdisjoint(in_graphs):
        message = _did_not_run(in_graphs, len(watched), step)
        return logging.WARNING, f"{message}. They were {_COMPILED}"
    found = {n: hook.module() for n, hook in silent.items()}
    with_parameters = [n for n, m in found.items() if m is not None and [*m.parameters()]]
    return logging.INFO, _did_not_run(with_parameters, len(watched), step)


def _modules_hidden(model: nn.Module) -> str:
    """What to log about modules in plain lists and dictionaries, if gradients reached them."""
    known, found = set(map(id, model.parameters())), []
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            parts = list(value.values()) if type(value) is dict else value
            if type(parts) not in (list, tuple):
                continue
            modules = [part for part in parts if isinstance(part, nn.Module)]
            inside = (parameter for part in modules for parameter in part.parameters())
            if any(p.grad is not None and id(p) not in known for p in inside):
                found.append(clean_name(f"{name}.{attribute}" if name else attribute))
    if not found:
        return ""
    return (
        f"modules in {called_all(found, _NAMED_AT_MOST)} get gradients and are not the model's: no "
        "optimizer that is given model.parameters() moves them, and nothing is logged for them. "
        "Keep them in a torch.nn.ModuleList or ModuleDict"
    )


def _why_none(model: nn.Module, silent: Mapping[str, ForwardHook], uncalled: Sequence[str]) -> str:
    if any(base.__module__.partition(".")[0] == "keras" for base in type(model).__mro__):
        return (
            "Keras keeps the layers of such a model where PyTorch does not look for them: make "
            "layers = torch.nn.ModuleList(model.layers) and give HookLogger that for the model"
        )
    if not silent:
        return "No module of this model computes anything by itself"
    if any(hook.ran_eagerly for hook in silent.values()):
        return "The model was not in training mode, or ran without gradients or on another thread"
    if uncalled and graphs_compiled() > 0:
        return (
            "Parameters got gradients, but Python called no module. If a function or a model was "
            f"{_COMPILED}"
        )
    if uncalled:
        return "Parameters got gradients, but no module was called, only forward() or a function"
    return "No module was called, and no parameter got a gradient: was another model trained?"


def _did_not_run(names: Sequence[str], watched: int, step: int) -> str:
    if not names:
        return ""
    return (
        f"{len(names)} of {watched} watched modules did not run at step {step}, nothing is "
        f"logged for their outputs: {called_all(names, _NAMED_AT_MOST)}"
    )

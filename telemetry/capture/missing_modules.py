"""Explains which modules are not measured, and why: messages after the first full step."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from telemetry.capture.hooks import ForwardHook
from telemetry.plain_text import called_all
from telemetry.records.step import is_inside
from telemetry.selection import clean_name
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED, graphs_compiled, is_compiled

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

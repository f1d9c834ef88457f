"""Explains why watched modules were not seen running."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import nn

from telemetry.capture.hooks import ForwardHook
from telemetry.capture.window import Window
from telemetry.selection import clean_name
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED, graphs_compiled, is_compiled

_NAMED_AT_MOST = 8

_COMPILED = (
    "compiled before HookLogger was made: make HookLogger before the first compiled call, or call "
    "torch._dynamo.reset_code_caches() once after making it, or train the logged steps under "
    'torch.compiler.set_stance("force_eager")'
    if GRAPHS_CAN_BE_OBSERVED
    else f"compiled: PyTorch {torch.__version__} cannot show what happens inside, 2.13 can. Update "
    "it, or train the logged steps without torch.compile"
)


def explain_silence(
    model: nn.Module, watched: Mapping[str, ForwardHook], window: Window, trained: Collection[str]
) -> tuple[int, str]:
    """The level and the message to log about watched modules that did not run in a full step.

    Modules without parameters are left out: many only run at random, or where they do something.

    The message is empty if there is nothing to say.

    Args:
        watched: The hooks, by the names of their modules.
        window: What the step has shown.
        trained: Names of all modules with a parameter that got a gradient in it.
    """
    ran, step = window.order, window.step
    silent = {name: hook for name, hook in watched.items() if name not in ran}
    took_part = {part for name in trained for part in accumulate(f".{name}".split("."), _join)}
    # Neither Python nor a compiled graph has called their hooks.
    uncalled = [n for n, h in silent.items() if n in took_part and not (h.ran_eagerly or h.traced)]
    if len(silent) == len(watched):
        message = f"no watched module was seen running at step {step}, so activations are missing"
        return logging.WARNING, f"{message}. {_why_none(model, silent, uncalled)}"
    compiled = [clean_name(n) for n, m in model.named_modules() if is_compiled(m)]
    in_graphs = [n for n in silent if any(_is_inside(n, part) for part in compiled)]
    if not set(uncalled).isdisjoint(in_graphs):
        return logging.WARNING, (
            f"{_did_not_run(in_graphs, len(watched), step)}. They were {_COMPILED}"
        )
    with_parameters = [n for n, h in silent.items() if _has_parameters(h)]
    if with_parameters:
        return logging.INFO, _did_not_run(with_parameters, len(watched), step)
    return logging.INFO, ""


def _join(outer: str, inner: str) -> str:
    return f"{outer}.{inner}" if outer else inner


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
    shown = ", ".join(name or "the model" for name in names[:_NAMED_AT_MOST])
    more = len(names) - _NAMED_AT_MOST
    return (
        f"{len(names)} of {watched} watched modules did not run at step {step}, nothing is "
        f"logged for their outputs: {shown}{f' and {more} more' if more > 0 else ''}"
    )


def _is_inside(name: str, part: str) -> bool:
    return not part or f"{name}.".startswith(f"{part}.")


def _has_parameters(hook: ForwardHook) -> bool:
    module = hook.module()
    return module is not None and next(module.parameters(), None) is not None

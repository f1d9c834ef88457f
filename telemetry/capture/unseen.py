"""Says what was not seen of the training, and why: steps, or watched modules that did not run."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from telemetry.capture.hooks import ForwardHook
from telemetry.selection import clean_name
from telemetry.shared.plain_text import called_all
from telemetry.torch_private import scaler_exists
from telemetry.torch_private.compiler import GRAPHS_CAN_BE_OBSERVED, graphs_compiled, is_compiled

# Backward passes of one step after which something is wrong, if in half of them there is evidence
# of it. Gradients may be accumulated over as many.
PASSES_WITHOUT_STEP = 20

NEVER_RAN = "the model never ran"

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"

_NAMED_AT_MOST = 8

_COMPILED = (
    "compiled before HookLogger was made: make HookLogger before the first compiled call, or call "
    "torch._dynamo.reset_code_caches() once after making it, or train the logged steps under "
    'torch.compiler.set_stance("force_eager")'
    if GRAPHS_CAN_BE_OBSERVED
    else f"compiled: PyTorch {torch.__version__} cannot show what happens inside, 2.13 can. Update "
    "it, or train the logged steps without torch.compile"
)


class StepsUnseen:
    """Gathers why one step does not end."""

    def __init__(self) -> None:
        self.other_steps = 0  # of optimizers with none of the model's parameters
        self._told = False
        self._passes = self._cleared = self._changed = 0
        self._version: int | None = None

    def after_pass(self, passes: int, parameter: Tensor) -> str | None:
        """So many backward passes have ended, this one at a parameter; what to log, if anything."""
        self._passes = passes
        # The first gradient after clearing is new, further ones are added to it in place.
        if passes > 1 and parameter.grad is not None:
            self._cleared += parameter.grad._version == 0
        if self._version is not None:
            self._changed += parameter._version != self._version
        self._version = parameter._version
        if passes != PASSES_WITHOUT_STEP:
            return None
        few = PASSES_WITHOUT_STEP // 2
        if self.other_steps >= few:
            cause = (
                "An optimizer with other parameters does step: it was made for a copy of the "
                "model, or before its parameters were replaced."
            )
        elif self._changed >= few:
            cause = (
                "The parameters do change: without a torch.optim.Optimizer, call logger.step() "
                "after each update."
            )
        elif self._cleared >= few:
            skips = ", unless a GradScaler, of which there is one, skips every step"
            cause = f"Gradients are cleared in between: {_FORGOTTEN}{skips * scaler_exists()}."
        else:
            return None
        self._told = True
        return (
            f"{passes} backward passes have reached this model without a step of an optimizer "
            f"that holds its parameters, and nothing is logged until there is one. {cause}"
        )

    def at_the_end(self, ran: str) -> tuple[int, str]:
        """The level and the message, if any, to log if the run ends before its first step.

        ``ran`` says what is known of the forward passes, for a step without a backward pass.
        """
        if self._told:
            return logging.NOTSET, ""
        passes = f"{self._passes} backward pass{'es' * (self._passes != 1)}"
        if self.other_steps:
            way_out = "those were made for a copy of the model, or before its parameters changed"
            other = f"{self.other_steps} steps of optimizers with other parameters; {way_out}"
        else:
            other = "no optimizer step" + f": {_FORGOTTEN}" * (self._passes > 0)
        idle = ran == NEVER_RAN and not self._passes and not self.other_steps
        message = f"0 steps recorded, {passes if self._passes else ran}, {other}"
        return logging.INFO if idle else logging.WARNING, message


def modules_unseen(
    model: nn.Module,
    watched: Mapping[str, ForwardHook],
    ran: Collection[str],
    step: int,
    trained: Collection[str],
) -> tuple[int, str]:
    """The level and the message, if any, about watched modules that did not run in a full step.

    Modules without parameters are left out: many only run at random, or where they do something.
    ``trained`` are the modules with a parameter that got a gradient.
    """
    silent = {name: hook for name, hook in watched.items() if name not in ran}
    took_part = {part for name in trained for part in accumulate(f".{name}".split("."), _join)}
    # Neither Python nor a compiled graph has called their hooks.
    uncalled = [n for n, h in silent.items() if n in took_part and not (h.ran_eagerly or h.traced)]
    if len(silent) == len(watched):
        message = f"no watched module was seen running at step {step}, so activations are missing"
        return logging.WARNING, f"{message}. {_why_none(model, silent, uncalled)}"
    compiled = [clean_name(n) for n, m in model.named_modules() if is_compiled(m)]
    in_graphs = [n for n in silent if any(not p or f"{n}.".startswith(f"{p}.") for p in compiled)]
    if not set(uncalled).isdisjoint(in_graphs):
        message = _did_not_run(in_graphs, len(watched), step)
        return logging.WARNING, f"{message}. They were {_COMPILED}"
    found = {n: hook.module() for n, hook in silent.items()}
    with_parameters = [n for n, m in found.items() if m is not None and [*m.parameters()]]
    return logging.INFO, _did_not_run(with_parameters, len(watched), step)


def modules_hidden(model: nn.Module) -> str:
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
    if not names:
        return ""
    return (
        f"{len(names)} of {watched} watched modules did not run at step {step}, nothing is "
        f"logged for their outputs: {called_all(names, _NAMED_AT_MOST)}"
    )

"""Lets ``torch.jit.script`` compile a module that is being watched."""

from __future__ import annotations

import logging
from collections.abc import Callable

from torch import nn

from telemetry.capture.hooks import ForwardHook, ModuleHook, is_inert_copy
from telemetry.torch_private import before_scripting

log = logging.getLogger("telemetry")


def leave_modules_that_are_scripted() -> Callable[[], None]:
    """From now on, take our hooks off each module that is about to be scripted.

    They are back at the next step that is measured. Returns what ends this.
    """
    return before_scripting(_leave)


def _leave(module: nn.Module) -> None:
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

"""Notices training that no optimizer of the watched model ever ends."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import Tensor

from telemetry.torch_private import scaler_exists

PASSES_WITHOUT_STEP = 20
"""Backward passes of one step after which something is wrong, if there is evidence of it. Gradients
may be accumulated over as many."""

PASSES_WITHOUT_EVIDENCE = 200

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"

NEVER_RAN = "the model never ran"


class NoStepWatch:
    """Follows the backward passes of one step, and explains once why the step does not end."""

    def __init__(self) -> None:
        self._told = False
        self._passes = 0
        self._other_steps = 0
        self._cleared = 0
        self._version: int | None = None
        self._changed = 0

    def other_step(self) -> None:
        """An optimizer with none of the model's parameters has stepped."""
        self._other_steps += 1

    def backward_ended(self, parameters: Iterable[Tensor]) -> str | None:
        """A backward pass has reached ``parameters``; what to log, if anything."""
        self._passes += 1
        self._look_at(next(iter(parameters)))
        evidence = max(self._other_steps, self._cleared, self._changed)
        few = PASSES_WITHOUT_STEP // 2
        if self._passes != (PASSES_WITHOUT_STEP if evidence >= few else PASSES_WITHOUT_EVIDENCE):
            return None
        self._told = True
        return (
            f"{self._passes} backward passes have reached this model without a step of an "
            "optimizer that holds its parameters, and nothing is logged until there is one. "
            f"{self._cause()}"
        )

    def at_the_end(self, ran: str) -> tuple[str | None, int]:
        """What to report if the run ends before its first step, and at which level of ``logging``.

        Nothing is lost where nothing ran. None if it was reported before.

        ``ran`` says what is known of the forward passes, for a step without a backward pass.
        """
        if self._told:
            return None, logging.NOTSET
        passes = f"{self._passes} backward pass{'es' * (self._passes != 1)}"
        if self._other_steps:
            way_out = "those were made for a copy of the model, or before its parameters changed"
            other = f"{self._other_steps} steps of optimizers with other parameters; {way_out}"
        else:
            other = "no optimizer step" + f": {_FORGOTTEN}" * (self._passes > 0)
        idle = ran == NEVER_RAN and not self._passes and not self._other_steps
        message = f"0 steps recorded, {passes if self._passes else ran}, {other}"
        return message, logging.INFO if idle else logging.WARNING

    def _look_at(self, parameter: Tensor) -> None:
        # The first gradient after clearing is new, further ones are added to it in place.
        if self._passes > 1 and parameter.grad is not None:
            self._cleared += parameter.grad._version == 0
        if self._version is not None:
            self._changed += parameter._version != self._version
        self._version = parameter._version

    def _cause(self) -> str:
        few = PASSES_WITHOUT_STEP // 2
        if self._other_steps >= few:
            return (
                "An optimizer with other parameters does step: it was made for a copy of the "
                "model, or before its parameters were replaced."
            )
        if self._changed >= few:
            return (
                "The parameters do change: without a torch.optim.Optimizer, call logger.step() "
                "after each update."
            )
        if self._cleared < few:
            return f"If gradients are not accumulated over more than these, {_FORGOTTEN}."
        cleared = f"Gradients are cleared in between: {_FORGOTTEN}"
        skips = ", unless a GradScaler, of which there is one, skips every step"
        return cleared + skips * scaler_exists() + "."

"""Says why no step of the training was seen."""

from __future__ import annotations

import logging

from torch import Tensor

from telemetry.torch_private import scaler_exists

# Backward passes of one step after which something is wrong, if in half of them there is evidence
# of it. Gradients may be accumulated over as many.
PASSES_WITHOUT_STEP = 20

NEVER_RAN = "the model never ran"

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"


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

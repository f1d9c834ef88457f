"""Explains why no step is recorded."""

from __future__ import annotations

import logging

from torch import Tensor

# Backward passes of one step after which the cause is logged, if half of them are evidence of it.
# Gradients may be accumulated over as many.
PASSES_WITHOUT_STEP = 20

NEVER_RAN = "the model never ran"

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"


class MissedSteps:
    """Evidence of why the step in progress does not end.

    Attributes:
        other_steps: Steps of optimizers with none of the model's parameters.
    """

    def __init__(self) -> None:
        self.other_steps = 0
        self._passes = self._cleared = 0
        self._version = (0, 0)  # of a parameter's gradient, with the parameter's identity
        self._is_reported = False

    def after_pass(self, passes: int, parameter: Tensor, *, is_alone: bool) -> str | None:
        """Record the end of a backward pass; return the message to log, if any.

        Args:
            passes: Number of passes of the step that have ended.
            parameter: First one that the pass has reached.
            is_alone: No other rank reduces gradients, which changes them, too.
        """
        self._passes = passes
        version = parameter.grad._version if parameter.grad is not None else 0
        # The first gradient after clearing is new, and further ones are added to it in place; or
        # it is cleared in place, too.
        identity, before = self._version
        in_place = is_alone and identity == id(parameter) and version > before + 1
        self._cleared = 0 if passes == 1 else self._cleared + (version == 0 or in_place)
        self._version = id(parameter), version
        few = PASSES_WITHOUT_STEP // 2
        if passes != PASSES_WITHOUT_STEP or max(self.other_steps, self._cleared) < few:
            return None
        if self.other_steps >= few:
            cause = (
                "An optimizer with other parameters does step: it was made for a copy of the "
                "model, or before its parameters were replaced."
            )
        else:
            cause = (
                f"Gradients are cleared in between: {_FORGOTTEN}, unless a GradScaler skips every "
                "step. For fastai, use the callback in telemetry.integrations.fastai."
            )
        self._is_reported = True
        return (
            f"{passes} backward passes have reached this model without a step of an optimizer "
            f"that holds its parameters. Nothing is logged until the first step. {cause}"
        )

    def at_the_end(self, ran: str) -> tuple[int, str]:
        """Return level and message to log if the run ends before its first step.

        ``ran`` describes the forward passes, for a step without a backward pass.
        """
        if self._is_reported:
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

"""Explains why no step is recorded."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torch import Tensor

from telemetry.capture.parameters import samples_of
from telemetry.torch_private import scaler_exists
from telemetry.torch_private.host_copy import HostCopy

# Backward passes of one step after which the cause is logged, if half of them are evidence of it.
# Gradients may be accumulated over as many.
PASSES_WITHOUT_STEP = 20

# A parameter is compared with itself after each quarter of these passes. Its values show what its
# version does not: ``parameter.data.add_()`` changes it, and so do fastai's optimizers.
_COMPARE_EVERY = PASSES_WITHOUT_STEP // 4

NEVER_RAN = "the model never ran"

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"


class MissedSteps:
    """Evidence of why the step in progress does not end."""

    def __init__(self) -> None:
        self.other_steps = 0  # of optimizers with none of the model's parameters
        self._judged = self._reported = False
        self._passes = self._cleared = 0
        self._compared = 0  # identity of the parameter that is compared
        self._sample: Tensor | None = None  # of its values
        self._changes: list[HostCopy] = []

    def after_pass(self, passes: int, accumulated: Mapping[int, Tensor]) -> str | None:
        """Record the end of a backward pass.

        Args:
            passes: How many have ended.
            accumulated: The parameters that the pass has reached, at least one, by identity.

        Returns:
            The message to log, if any.
        """
        self._passes = passes
        first = next(iter(accumulated.values()))
        # The first gradient after clearing is new, further ones are added to it in place.
        if passes > 1 and first.grad is not None:
            self._cleared += first.grad._version == 0
        if passes % _COMPARE_EVERY == 0 and passes <= PASSES_WITHOUT_STEP:
            self._compare(accumulated.get(self._compared or id(first)))
            self._compared = self._compared or id(first)
        # An accelerator may say later whether a parameter has changed.
        is_known = all(change.arrived() for change in self._changes)
        if passes < PASSES_WITHOUT_STEP or self._judged or not is_known:
            return None
        self._judged = True
        few = PASSES_WITHOUT_STEP // 2
        if self.other_steps >= few:
            cause = (
                "An optimizer with other parameters does step: it was made for a copy of the "
                "model, or before its parameters were replaced."
            )
        elif self._changes and all(change.wait() for change in self._changes):
            cause = (
                "The parameters do change: without a torch.optim.Optimizer, call logger.step() "
                "after each update; for fastai, use the callback in telemetry.integrations.fastai."
            )
        elif self._cleared >= few:
            skips = ", unless the GradScaler skips every step"
            cause = f"Gradients are cleared in between: {_FORGOTTEN}{skips * scaler_exists()}."
        else:
            return None
        self._reported = True
        return (
            f"{passes} backward passes have reached this model without a step of an optimizer "
            f"that holds its parameters. Nothing is logged until the first step. {cause}"
        )

    def _compare(self, parameter: Tensor | None) -> None:
        """Note whether a parameter has changed since the last call."""
        for _, sample in () if parameter is None else samples_of([(0, parameter)]):
            before, self._sample = self._sample, sample.nan_to_num()  # a copy; NaN equals NaN
            if before is not None and before.shape == sample.shape:
                self._changes.append(HostCopy((self._sample != before).any()))

    def at_the_end(self, ran: str) -> tuple[int, str]:
        """Return level and message to log if the run ends before its first step.

        ``ran`` describes the forward passes, for a step without a backward pass.
        """
        if self._reported:
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

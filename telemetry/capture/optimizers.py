"""Turns of the optimizers: which of them ends a training step, and why no step ends.

A training step ends when the optimizer that steps at every batch has stepped, or the last one if
several do. The gradients that a less frequent optimizer uses after that belong to the next step. An
optimizer that another one calls ends no step: its caller does (Lookahead, ZeroRedundancyOptimizer).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from telemetry.capture.parameters import Indexed, ParameterTable
from telemetry.capture.scaler import PassEnd
from telemetry.torch_private import is_called_by

log = logging.getLogger("telemetry")

# An optimizer no longer ends steps if it was absent from three of the latest eight: it steps less
# often than another, or a second stage of training has begun. A ``GradScaler`` skips single steps.
_RECENT_STEPS = 8
_ABSENT_STEPS = 3


class Turns:
    """Turns of the optimizers that hold the model's parameters, as the loop reports them.

    Args:
        given: The optimizer that ends the steps; None: found by the rule above. In the first batch
            that is the one after whose step every gradient has been used, or else the last one
            before the next forward pass.
    """

    def __init__(self, table: ParameterTable, given: Optimizer | None) -> None:
        self._table = table
        self._given = None if given is None else weakref.ref(given)
        # Those that have stepped, in the order of their first steps.
        self._met: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()
        self.forget()

    def forget(self) -> None:
        """Forget which optimizer ends the steps, unless the user has named it."""
        self._ends: weakref.ref[Optimizer] | None = self._given
        self._begun: set[weakref.ref[Optimizer]] = set()  # in the step in progress
        self._latest: weakref.ref[Optimizer] | None = None  # that has stepped in it
        self._running: weakref.ref[Optimizer] | None = None  # whose step is running
        self._absences: deque[bool] = deque(maxlen=_RECENT_STEPS)

    # --- questions --------------------------------------------------------------------------------

    @property
    def ends(self) -> Optimizer | None:
        """Optimizer that ends the steps; None: not known yet."""
        return None if self._ends is None else self._ends()

    def met(self, optimizer: Optimizer) -> Iterable[Optimizer]:
        """Return all optimizers that have stepped, and this one that is about to."""
        self._met.setdefault(optimizer)
        return self._met

    def is_only(self, optimizer: Optimizer) -> bool:
        """Whether no other optimizer has stepped."""
        return len(self._met) == 1 and optimizer in self._met

    def is_inner(self, optimizer: Optimizer) -> bool:
        """Whether another optimizer calls this one."""
        outer = None if self._running is None else self._running()
        # One whose step has raised is not running any more.
        return outer is not None and outer is not optimizer and is_called_by(outer)

    def has_raised(self, optimizer: Optimizer) -> bool:
        """Whether the only optimizer, which is about to step, has not ended its step before."""
        return self._running == weakref.ref(optimizer) and self.is_only(optimizer)

    def counted(self, optimizer: Optimizer) -> Indexed:
        """Return the parameters for which this optimizer's step counts, each once.

        Of two optimizers with the same parameters, the steps of the one that ends steps count.
        """
        ends, others = self.ends, set[int]()
        has_ended = bool(self._absences) and not self._absences[-1]  # the step before
        if has_ended and ends not in (None, optimizer) and not self.is_inner(optimizer):
            others = {index for index, _ in self._table.of(ends)}
        of = dict(self._table.of(optimizer))
        return [(index, parameter) for index, parameter in of.items() if index not in others]

    # --- what happens -----------------------------------------------------------------------------

    def begin(self, optimizer: Optimizer) -> bool:
        """Begin an optimizer's turn; whether it begins the next step."""
        if self.is_inner(optimizer):
            if self.ends is optimizer:
                self._ends = self._running
            return False
        this = self._running = weakref.ref(optimizer)
        is_next = this in self._begun and self._begins_next_step(optimizer)
        self._begun.add(this)
        return is_next

    def _begins_next_step(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that steps again does so for the next step."""
        ends, latest = self.ends, None if self._latest is None else self._latest()
        if ends is None:
            return self.settle()
        if ends is optimizer or latest is None or self._given is not None:
            return False
        self._absences.append(True)
        if sum(self._absences) >= _ABSENT_STEPS:
            self._ends = self._latest
            self._absences.clear()
            log.warning(
                "telemetry: %s steps more often than %s, so its steps are counted from here on; "
                "HookLogger(optimizer=...) sets the optimizer whose steps are counted",
                type(latest).__name__,
                type(ends).__name__,
            )
        return True

    def end(self, optimizer: Optimizer, held: Collection[int]) -> bool:
        """End the turn of an optimizer that no other one calls; whether the step ends.

        ``held``: Indices of the parameters that stepped, in the step in progress.
        """
        self._running = None
        self._latest, ends = weakref.ref(optimizer), self.ends
        if ends is None and self._table.all_among(held) and self.settle():
            ends = optimizer
        if ends is not optimizer:
            return False
        self._absences.append(False)
        return True

    def settle(self) -> bool:
        """Whether the step is open only for other optimizers; then the latest one ends steps."""
        if self.ends is not None or self._latest is None or self._latest() is None:
            return False
        self._ends = self._latest
        return True

    def step_ended(self) -> None:
        """Begin the next step, to which an optimizer that is running belongs."""
        self._latest = None
        self._begun = set() if self._running is None else {self._running}


# --- steps that do not end ------------------------------------------------------------------------

# Backward passes of one step after which the cause is logged, if half of them are evidence of it.
# Gradients may be accumulated over as many.
PASSES_WITHOUT_STEP = 20

NEVER_RAN = "the model never ran"

_FORGOTTEN = "call optimizer.step(), or logger.step() if there is no torch.optim.Optimizer"

_SKIPPED = (
    "a GradScaler skips such steps and halves its scale. If a smaller scale does not end this, NaN "
    "or infinity is in the data, the model or the loss. What was measured is recorded as step 0 "
    "when the logger closes"
)


class MissedSteps:
    """Evidence of why the step in progress does not end.

    Attributes:
        other_steps: Steps of optimizers with none of the model's parameters.
        overflows: Whether gradients are NaN or infinite in each pass, so that a scaler skips them.
    """

    def __init__(self) -> None:
        self.other_steps = 0
        self.overflows = False
        self._passes = self._cleared = 0
        self._version = (0, 0)  # of a parameter's gradient, with the parameter's identity
        self._is_reported = False

    def after_pass(
        self, passes: int, parameter: Tensor, ends: Sequence[PassEnd], *, is_alone: bool
    ) -> str | None:
        """Record the end of a backward pass; return the message to log, if any.

        Args:
            passes: Number of passes of the step that have ended.
            parameter: First one that the pass has reached.
            ends: Of passes whose gradients may not be finite; the earlier half of them is read,
                which an accelerator has reached by then.
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
        elif self._have_overflown(ends, few):
            cause = f"Gradients are NaN or infinite at each: {_SKIPPED}."
        else:
            cause = (
                f"Gradients are cleared in between: {_FORGOTTEN}. For fastai, use the callback in "
                "telemetry.integrations.fastai."
            )
        self._is_reported = True
        return (
            f"{passes} backward passes have reached this model without a step of an optimizer "
            f"that holds its parameters. Nothing is logged until the first step. {cause}"
        )

    def _have_overflown(self, ends: Sequence[PassEnd], passes: int) -> bool:
        """Whether gradients were NaN or infinite in the first passes."""
        overflown = [end.is_overflown for end in ends[:passes]]
        self.overflows = len(overflown) == passes > 0 and all(overflown)
        return self.overflows

    def at_the_end(self, ran: str, ends: Sequence[PassEnd]) -> tuple[int, str]:
        """Return level and message to log if the run ends before its first step.

        ``ran`` describes the forward passes, for a step without a backward pass.
        """
        if self._is_reported:
            return logging.NOTSET, ""
        passes = f"{self._passes} backward pass{'es' * (self._passes != 1)}"
        if self.other_steps:
            way_out = "those were made for a copy of the model, or before its parameters changed"
            other = f"{self.other_steps} steps of optimizers with other parameters; {way_out}"
        elif self._have_overflown(ends, self._passes):
            other = f"all with NaN or infinite gradients, no optimizer step: {_SKIPPED}"
        else:
            other = "no optimizer step" + f": {_FORGOTTEN}" * (self._passes > 0)
        idle = ran == NEVER_RAN and not self._passes and not self.other_steps
        message = f"0 steps recorded, {passes if self._passes else ran}, {other}"
        return logging.INFO if idle else logging.WARNING, message

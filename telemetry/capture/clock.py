"""Which optimizer's step ends a step of training."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable

from torch.optim import Optimizer

from telemetry.torch_private import NO_TASK, backward_task

log = logging.getLogger("telemetry")

_STEPS_UNTIL_REPLACED = 20
"""Steps of another optimizer, without one of the primary in between, after which that is the
primary: a second stage of training has begun, and the first stage's optimizer still exists."""


class StepClock:
    """Counts the optimizer steps of one model.

    A step is over when the primary optimizer has stepped: the one given, or the one after whose
    step no gradient is left for another, or the last one before the next pass of training. Another
    takes its place when it is gone, or when that one steps on and on without it.

    The optimizers are held weakly.

    Attributes:
        thread: That steps; None until a step has ended outside of a backward pass.
    """

    def __init__(self, primary: Optimizer | None = None) -> None:
        self.thread: int | None = None
        self._primary = weakref.ref(primary) if primary is not None else None
        self._is_given = primary is not None
        # Has stepped while there is no primary, and others may be about to.
        self._waiting: weakref.ref[Optimizer] | None = None
        # Of each other optimizer, since the primary last stepped.
        self._steps_without: weakref.WeakKeyDictionary[Optimizer, int]
        self._steps_without = weakref.WeakKeyDictionary()

    def step_begins(self, optimizer: Optimizer) -> bool:
        """Whether that ends the step before: the same optimizer took that."""
        return self._waiting is not None and self._waiting() is optimizer and self.pass_begins()

    def pass_begins(self) -> bool:
        """Whether that ends a step: no other optimizer will use the gradients at hand."""
        last = self._waiting() if self._waiting is not None else None
        if last is not None:
            self._set_primary(last)
        return last is not None

    def has_stepped(self, optimizer: Optimizer, all_stepped: Callable[[], bool]) -> bool:
        """Whether that ends the step.

        Args:
            optimizer: Holds parameters of the model.
            all_stepped: Whether every parameter that has a gradient was stepped by now.
        """
        primary = self._primary() if self._primary is not None else None
        if primary is None:
            if not all_stepped():
                self._waiting = weakref.ref(optimizer)
                return False
        elif primary is not optimizer:
            steps = self._steps_without.get(optimizer, 0) + 1
            self._steps_without[optimizer] = steps
            if self._is_given or steps < _STEPS_UNTIL_REPLACED:
                return False
            log.warning(
                "telemetry: %s no longer steps, %s does, so its steps are counted from here on; "
                "HookLogger(optimizer=...) names the one that counts",
                type(primary).__name__,
                type(optimizer).__name__,
            )
        self._set_primary(optimizer)
        return True

    def step_ends(self) -> None:
        """Note the thread that steps; in a backward pass it may be one of autograd's."""
        if backward_task() == NO_TASK:
            self.thread = threading.get_ident()

    def _set_primary(self, optimizer: Optimizer) -> None:
        self._primary = weakref.ref(optimizer)
        self._waiting = None
        self._steps_without.clear()

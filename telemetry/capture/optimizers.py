"""Turns of the optimizers: which of them ends a training step, and whose gradients count.

A training step ends when the optimizer that steps at every batch has stepped, or the last one if
several do. The gradients that a less frequent optimizer uses after that belong to the next step. An
optimizer that another one calls ends no step: its caller does (Lookahead, ZeroRedundancyOptimizer).
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Collection, Iterable
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from telemetry.capture.parameters import Indexed, ParameterTable
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

    def run(self, optimizer: Optimizer) -> None:
        """Note that an optimizer's own step begins to run."""
        self._running = weakref.ref(optimizer)

    def leave_to_caller(self, optimizer: Optimizer) -> None:
        """Let the running optimizer end the steps instead of one that it calls."""
        if self.ends is optimizer:
            self._ends = self._running

    def begins_next_step(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that is about to step has begun the next step."""
        if weakref.ref(optimizer) not in self._begun:
            return False
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

    def begin(self, optimizer: Optimizer) -> None:
        """Begin an optimizer's turn in the step in progress."""
        self._begun.add(weakref.ref(optimizer))

    def finish(self) -> None:
        """Note that no optimizer's step is running any more."""
        self._running = None

    def end(self, optimizer: Optimizer, held: Collection[int]) -> bool:
        """End an optimizer's turn; whether the step ends.

        ``held``: Indices of the parameters that stepped, in the step in progress.
        """
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
        """Begin the next step."""
        self._latest = None
        self._begun.clear()

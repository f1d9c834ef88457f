"""What each step costs, and how much of that is telemetry's own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import nn

from telemetry.budget import Budget, Stopwatch
from telemetry.capture.window import Window
from telemetry.records import Module
from telemetry.torch_private import undisturbed


class StepCosts:
    """Asks a budget, if there is one, how much of a step to measure, and enters the step into it.

    On the CPU, telemetry's share of a step is the CPU time that the training thread spends inside
    of :attr:`own`. On a CUDA device, which only queues work, an event is recorded at the end of
    each step; the step is entered once the device has reached it, which nobody waits for.

    Attributes:
        own: Entered while anything is done on the training thread; None without a budget.
        limited: Whether there is a budget; without one there is no need to ask or to enter.
    """

    def __init__(self, budget: Budget | None) -> None:
        self._budget = budget
        self.limited = budget is not None
        self._stopwatch = Stopwatch()
        self.own: AbstractContextManager[None] | None = self._stopwatch if self.limited else None
        self._last_s: float | None = None
        self._last_event: torch.cuda.Event | None = None
        # Step, whether full, whether with norms; and the event at its end.
        self._queued: deque[tuple[int, bool, bool, torch.cuda.Event]] = deque()

    def affords(self, *, full: bool) -> tuple[bool, bool]:
        """Whether the next step, if it is wanted in ``full``, can be; whether its norms can."""
        if self._budget is None:
            return full, True
        full = full and self._budget.affords_full()
        return full, full or self._budget.affords_norms()

    def left_out(self, modules: Sequence[Module]) -> frozenset[str]:
        """Names of the modules whose turn it is not in a step that is measured in full."""
        if self._budget is None:
            return frozenset()
        turn = self._budget.begin_full(len(modules))
        return frozenset(module.name for i, module in enumerate(modules) if not turn.takes(i))

    def restart(self) -> None:
        """The next step begins now: what came before belongs to none."""
        self._last_s, self._last_event = None, None
        self._queued.clear()
        self._stopwatch.take()

    def enter(self, window: Window, model: nn.Module | None) -> None:
        """A step ended; work for the next one has not begun."""
        if self._budget is not None and model is not None:
            with undisturbed():
                device = next(model.parameters()).device
            self.step_ended(window.step, full=window.full, norms=window.norms, device=device)

    def step_ended(self, step: int, *, full: bool, norms: bool, device: torch.device) -> None:
        """The same of a step with this number, done on this device."""
        if self._budget is None:
            return
        if device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(device))
            self._queued.append((step, full, norms, event))
            self._settle(self._budget)
            return
        now = time.perf_counter()
        own_s, before = self._stopwatch.take(), self._last_s
        self._last_s = now
        # The first step after a start began somewhere before it; what it cost is known.
        step_s = own_s if before is None else now - before
        self._budget.completed(step, full=full, norms=norms, step_s=step_s, own_s=own_s)

    def _settle(self, budget: Budget) -> None:
        """Enter the steps that the device has finished."""
        while self._queued and self._queued[0][-1].query():
            step, full, norms, event = self._queued.popleft()
            before, self._last_event = self._last_event, event
            step_s = before.elapsed_time(event) * 1e-3 if before is not None else 0.0
            budget.completed(step, full=full, norms=norms, step_s=step_s, own_s=None)

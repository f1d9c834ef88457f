"""Account of the time that training earns for telemetry, and of what measuring takes."""

from __future__ import annotations

import threading
import time
from collections import deque
from statistics import fmean, median
from typing import Literal, TypeAlias

import torch

Plan: TypeAlias = Literal["skip", "norms", "full"]
"""What a step measures: nothing, gradient norms, or every tensor."""

Work: TypeAlias = Literal["norms", "full", "logged"]
"""Work of the worker: a step with norms, a full step, logged scalars."""

NORMS_SHARE = 0.75  # of a limited share, for norms; the rest remains for full steps
SAVED_STEPS = 16  # steps with norms for which the account saves up


class Account:
    """Earns a share of the bare time of each step, and pays the time that measuring takes.

    That is CPU time of the training thread and of the worker, which share the interpreter lock. On
    a CUDA device, which queues work, it is the time by which full steps take longer than others,
    between events at the ends of steps. They are entered when the device has reached them, without
    waiting. Norms have an entry of their own: what they may take of the share.

    Args:
        pays_full: Whether full steps are paid, too; then scalars that the user logs leave less for
            norms.

    Attributes:
        stopwatch: Times what telemetry does on the training thread.
    """

    def __init__(self, share: float, *, pays_full: bool) -> None:
        self.stopwatch = Stopwatch(is_on=pays_full)
        self._share, self._pays_full = share, pays_full
        self._own_s = self._bare_s = self._norms_s = self._logged_s = 0.0
        self._own: dict[Work, _Costs] = {"norms": _Costs(), "full": _Costs()}
        self._of_worker: dict[Work, _Costs] = {
            **{w: _Costs() for w in self._own},
            "logged": _Costs(),
        }
        self._steps_s: deque[float] = deque(maxlen=32)  # bare times of other than full steps
        self._device = torch.device("cpu")
        self._last_s: float | None = None
        self._last_event: torch.cuda.Event | None = None
        self._queued: deque[tuple[Plan, torch.cuda.Event]] = deque()

    def restart(self) -> None:
        """Begin the step in progress now; the time before it belongs to no step."""
        self._last_s = self._last_event = None
        self._queued.clear()
        self.stopwatch.take()

    def measure(self, device: torch.device) -> None:
        """Measure steps on this device from here on."""
        self._device = device

    def worker_took(self, work: Work, seconds: float) -> None:
        """Add CPU time of the worker, which calls this, for one step or scalar."""
        self._of_worker[work].add(seconds)

    # --- the end of a step -----------------------------------------------------------------------

    def step_ended(self, plan: Plan) -> bool:
        """Enter the step that has ended; whether the cost of a full step has become known."""
        if not (self._pays_full and self._device.type == "cuda"):
            now, own_s = time.perf_counter(), self.stopwatch.take()
            # The begin of the first step after a start is unknown; its cost is known.
            step_s = own_s if self._last_s is None else now - self._last_s
            self._last_s = now
            self._enter(plan, step_s, own_s)
            return plan == "full"
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._queued.append((plan, event))
        is_known = False
        while self._queued and self._queued[0][1].query():
            plan, event = self._queued.popleft()
            before, self._last_event = self._last_event, event
            step_s = before.elapsed_time(event) * 1e-3 if before is not None else 0.0
            longer_s = max(step_s - (self.step_s or step_s), 0.0)
            self._enter(plan, step_s, longer_s if plan == "full" else 0.0)
            is_known |= plan == "full"
        return is_known

    def _enter(self, plan: Plan, step_s: float, own_s: float) -> None:
        bare_s = max(step_s - own_s, 0.0)
        self._own_s += own_s
        self._bare_s += bare_s
        if plan != "full":
            self._steps_s.append(bare_s)
        if plan != "skip":
            self._own[plan].add(own_s)
        earned_s = self._share * bare_s
        if self._pays_full:
            logged_s = 2 * self._of_worker["logged"].sum_s  # on the training thread about as much
            earned_s = NORMS_SHARE * earned_s - (logged_s - self._logged_s)
            self._logged_s = logged_s
        most_s = SAVED_STEPS * self.cost_s("norms")
        self._norms_s = min(max(self._norms_s + earned_s, -most_s), most_s)

    # --- what it covers --------------------------------------------------------------------------

    @property
    def step_s(self) -> float:
        """Usual bare time of a step; 0 while unknown."""
        return median(self._steps_s or [0.0])

    @property
    def overhead(self) -> float | None:
        """Time of telemetry relative to bare training; None while that is unknown."""
        return (self._spent_s + self._logged_s) / self._bare_s if self._bare_s > 0 else None

    @property
    def _spent_s(self) -> float:
        if self._device.type == "cuda":
            return self._own_s
        return self._own_s + self._of_worker["full"].sum_s + self._of_worker["norms"].sum_s

    def cost_s(self, work: Work) -> float:
        """Return the usual cost of a step."""
        return self._own[work].mean_s + self._of_worker[work].mean_s

    def covers(self, work: Work) -> bool:
        """Whether the whole share covers a step; not while the cost of a full step is unknown."""
        is_known = all(plan != "full" for plan, _ in self._queued)
        return is_known and self._spent_s + self.cost_s(work) <= self._share * self._bare_s

    def covers_norms(self) -> bool:
        """Whether the part for norms covers those of a step."""
        return self._norms_s >= self.cost_s("norms")

    def pay_norms(self) -> None:
        """Pay the norms of the next step, if necessary on credit."""
        self._norms_s = max(self._norms_s - self.cost_s("norms"), 0.0)


class _Costs:
    """Times of one kind of work: their sum, and the mean of the last ones."""

    def __init__(self) -> None:
        self.sum_s = self.mean_s = 0.0
        self._latest_s = deque[float](maxlen=SAVED_STEPS)

    def add(self, seconds: float) -> None:
        self.sum_s += seconds
        self._latest_s.append(seconds)
        self.mean_s = fmean(self._latest_s)


class Stopwatch:
    """Adds up the CPU time of one thread inside of ``with`` blocks, which may be nested.

    Attributes:
        is_on: Whether blocks that begin are timed.
    """

    def __init__(self, *, is_on: bool) -> None:
        self.is_on = is_on
        self._thread, self._nesting = threading.get_ident(), 0
        self._begin_s = self._inside_s = 0.0

    def __enter__(self) -> None:
        if not self.is_on or threading.get_ident() != self._thread:
            return
        if self._nesting == 0:
            self._begin_s = time.thread_time()
        self._nesting += 1

    def __exit__(self, *exception: object) -> None:
        if self._nesting == 0 or threading.get_ident() != self._thread:
            return
        self._nesting -= 1
        if self._nesting == 0:
            self._inside_s += time.thread_time() - self._begin_s

    def take(self) -> float:
        """Return the seconds since the last call; from now on the caller's thread is timed."""
        if threading.get_ident() != self._thread:
            self._thread, self._nesting = threading.get_ident(), 0
        elif self._nesting:
            now = time.thread_time()
            self._inside_s += now - self._begin_s
            self._begin_s = now
        taken_s, self._inside_s = self._inside_s, 0.0
        return taken_s

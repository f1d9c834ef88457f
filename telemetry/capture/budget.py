"""Limits the cost of telemetry: increases the interval between full steps."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from math import ceil
from statistics import fmean, median
from typing import Literal, TypeAlias, get_args

import torch

log = logging.getLogger("telemetry")

# Share of the budget for gradient norms; the rest remains for full steps.
NORMS_SHARE = 0.75

DECISION_STEPS = 32  # steps with norms between decisions on their interval
MAX_NORMS_EVERY = 100

Work: TypeAlias = Literal["full", "norms", "logged"]
"""Work of the worker thread: a full step, another step, a logged scalar."""


class Budget:
    """Keeps telemetry within a share of the time of bare training, by an account.

    Each step earns ``max_overhead`` of the time of bare training. A due full step is postponed
    until the account covers its usual cost; the first is taken on credit. Norms are taken at every
    other step, or at every k-th if they alone took more than :data:`NORMS_SHARE` of the earnings.

    On the CPU, the cost is the CPU time of two threads, which share the interpreter lock: the
    worker, and the training thread inside of ``with`` blocks of the budget, which may be nested.
    Scalars that the user logs are always processed; their cost leaves less for norms.

    A CUDA device queues work. There an event is recorded at the end of each step, and a full step
    costs the time that it takes longer than usual. Its cost enters the account later, when the
    device has reached the event, without waiting.

    Args:
        max_overhead: The share, above 0 and at most 1.
        every_n_steps: Interval of full steps if the budget allows it.
        log_costs: Called with curves and the number of each full step, when its cost is known.
    """

    def __init__(
        self,
        *,
        max_overhead: float,
        every_n_steps: int,
        log_costs: Callable[[Mapping[str, float], int], None] = lambda curves, step: None,
    ) -> None:
        if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool):
            raise TypeError(f"HookLogger(max_overhead={max_overhead!r}): must be a number")
        if not 0 < max_overhead <= 1:
            raise ValueError(
                f"HookLogger(max_overhead={max_overhead}): must be above 0 and at most 1; 0.01 is "
                "one percent, math.inf is no limit"
            )
        self._log_costs = log_costs
        self._share, self._every_n_steps = max_overhead, every_n_steps
        self._own_s = self._bare_s = 0.0
        self._norms_every = 1
        self._last_full: int | None = None
        self._full_s: deque[float] = deque(maxlen=5)  # of the last full steps
        self._bare_steps_s: deque[float] = deque(maxlen=DECISION_STEPS)
        self._norms_s: list[float] = []
        # Written by the worker thread; the account holds the first ``_entered_s`` of it.
        self._worker_s = dict[Work, float].fromkeys(get_args(Work), 0.0)
        self._worker_costs_s = {
            work: deque[float](maxlen=DECISION_STEPS) for work in get_args(Work)
        }
        self._entered_s = 0.0
        self._logged_curves: set[str] = set()
        self._thread, self._nesting = threading.get_ident(), 0
        self._begin_s = self._inside_s = 0.0
        self._last_s: float | None = None
        self._last_step: int | None = None
        self._last_event: torch.cuda.Event | None = None
        # Step, whether it is full, whether it has norms, and the event at its end.
        self._queued: deque[tuple[int, bool, bool, torch.cuda.Event]] = deque()

    def affords(self, step: int, *, full: bool) -> tuple[bool, bool]:
        """Whether the next step can be ``full``, if it is due; whether its norms can be taken."""
        if full and (self._last_full is not None or self._queued):
            unsettled = any(queued_full for _, queued_full, *_ in self._queued)
            cost_s = median(self._full_s or [0.0]) + self._mean_worker_s("full")
            full = not unsettled and self._own_s + cost_s <= self._share * self._bare_s
            if not full and not unsettled:
                self._log_once(
                    f"measuring less often than every {self._every_n_steps} steps (a measurement "
                    f"takes {cost_s * 1e3:.3g} ms, a step {self._usual_step_s() * 1e3:.3g} ms)",
                    "every_n_steps",
                )
        return full, full or self.have_norms(step)

    def have_norms(self, step: int) -> bool:
        """Whether the norms of a step that is not full can be taken."""
        return step % self._norms_every == 0

    def worker_took(self, work: Work, seconds: float) -> None:
        """Add CPU time of the worker thread, which calls this, for one step or scalar."""
        self._worker_s[work] += seconds
        self._worker_costs_s[work].append(seconds)

    def restart(self) -> None:
        """Begin the next step now; the time before it belongs to no step."""
        self._last_s = self._last_step = self._last_event = None
        self._queued.clear()
        self._take()

    def step_ended(self, step: int, *, full: bool, norms: bool, device: torch.device) -> None:
        """Enter a step that ended on this device, before work for the next one begins.

        Steps without norms may be omitted: their time is part of the next one's.
        ``norms``: whether at least the norms of its gradients were taken.
        """
        if device.type != "cuda":
            now, own_s = time.perf_counter(), self._take()
            # The begin of the first step after a start is unknown; its cost is known.
            step_s = own_s if self._last_s is None else now - self._last_s
            self._last_s = now
            in_background_s = self._worker_s["full"] + self._worker_s["norms"]
            self._own_s += in_background_s - self._entered_s
            self._entered_s = in_background_s
            self._enter(step, full, norms, step_s, own_s)
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        self._queued.append((step, full, norms, event))
        while self._queued and self._queued[0][-1].query():
            step, full, norms, event = self._queued.popleft()
            before, self._last_event = self._last_event, event
            step_s = before.elapsed_time(event) * 1e-3 if before is not None else 0.0
            longer_s = max(step_s - self._usual_step_s(step_s), 0.0) if full else 0.0
            self._enter(step, full, norms, step_s, longer_s)

    def _enter(self, step: int, full: bool, norms: bool, step_s: float, own_s: float) -> None:
        bare_s = max(step_s - own_s, 0.0)
        steps = 1 if self._last_step is None else max(step - self._last_step, 1)
        self._last_step = step
        self._own_s += own_s
        self._bare_s += bare_s
        if full:
            self._full_s.append(own_s)
            distance = self._every_n_steps if self._last_full is None else step - self._last_full
            self._last_full = step
            curves = {"every_n_steps": distance, "norms_every_n_steps": self._norms_every}
            # At first the time of bare training is unknown.
            all_s = self._own_s + self._logged_s()
            overhead = {"overhead": all_s / self._bare_s} if self._bare_s > 0 else {}
            self._log_costs(
                {f"telemetry/{k}": float(v) for k, v in (curves | overhead).items()}, step
            )
            return
        self._bare_steps_s.append(bare_s / steps)
        self._norms_s += [own_s] * norms
        if len(self._norms_s) == DECISION_STEPS:
            step_s = max(self._usual_step_s(), 1e-9)
            share = (median(self._norms_s) + self._mean_worker_s("norms")) / step_s
            allowed = NORMS_SHARE * self._share - self._logged_s() / max(self._bare_s, 1e-9)
            every = ceil(share / allowed) if allowed > 0 else MAX_NORMS_EVERY
            self._norms_every = min(max(every, 1), MAX_NORMS_EVERY)
            self._norms_s.clear()
            if self._norms_every > 1:
                self._log_once(
                    f"gradient norms at one step in {self._norms_every}: at all of them they alone "
                    f"take {share:.2%} of the time of training",
                    "norms_every_n_steps",
                )

    def _logged_s(self) -> float:
        """Return the time of logged scalars: on the training thread about as much again."""
        return 2 * self._worker_s["logged"]

    def _mean_worker_s(self, work: Work) -> float:
        return fmean([*self._worker_costs_s[work]] or [0.0])

    def _usual_step_s(self, otherwise: float = 0.0) -> float:
        return median(self._bare_steps_s or [otherwise])

    def _log_once(self, change: str, curve: str) -> None:
        """Log once which interval has increased, and the curve that shows it."""
        if curve not in self._logged_curves:
            self._logged_curves.add(curve)
            to_stay = f"to stay within max_overhead={self._share:g}"
            log.warning("telemetry: %s: %s; see the curve telemetry/%s", to_stay, change, curve)

    # --- the stopwatch -------------------------------------------------------------------------

    def __enter__(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._nesting == 0:
            self._begin_s = time.thread_time()
        self._nesting += 1

    def __exit__(self, *exception: object) -> None:
        if threading.get_ident() != self._thread or self._nesting == 0:
            return
        self._nesting -= 1
        if self._nesting == 0:
            self._inside_s += time.thread_time() - self._begin_s

    def _take(self) -> float:
        """Return the seconds since the last call; from now on the caller's thread is measured."""
        if threading.get_ident() != self._thread:
            self._thread, self._nesting = threading.get_ident(), 0
        elif self._nesting:
            now = time.thread_time()
            self._inside_s += now - self._begin_s
            self._begin_s = now
        taken_s, self._inside_s = self._inside_s, 0.0
        return taken_s

"""Schedule: what each step measures. An account of the time that it takes decides what is taken."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from statistics import fmean, median
from typing import Any, Literal, TypeAlias

import torch

log = logging.getLogger("telemetry")

Plan: TypeAlias = Literal["skip", "norms", "full"]
"""What a step measures: nothing, gradient norms, or every tensor."""

Work: TypeAlias = Literal["norms", "full", "logged"]
"""Work of the worker: a step with norms, a full step, logged scalars."""

NORMS_EVERY, EVERY, OVERHEAD = (
    f"telemetry/{name}" for name in ("norms_every_n_steps", "every_n_steps", "overhead")
)

# Chosen manually.
SHARE = 0.03  # of the bare time, for norms, without ``max_overhead``
FIRST_STEPS = 256  # which have norms: the baseline is unknown before
DENSE_STEPS = 64  # which have norms after an unusual one: rules may need several
MAX_NORMS_EVERY = 64

# Limit of requests that confirm nothing: a number of them, and a share of the due full steps.
ALLOWANCE = 3
ALLOWANCE_SHARE = 0.25
FOLLOW_UPS = 2  # that do not count; tried 1 and 3
PAUSE = 10  # steps, doubled by each request that confirms nothing
IN_A_ROW = 2  # full steps of a follow-up, which may need the changes from one to the next; tried 1

_COUNTS = (
    "scheduled",
    "requested",
    "_is_due",
    "_judged_due",
    "_unconfirmed",
    "_follow_ups",
    "_pauses_until",
)


class Schedule:
    """Plans each step: it is skipped, has gradient norms, or is a full step.

    Full steps are due at 0, N, 2N, ... and where rules request one; norms are due at each step. An
    :class:`Account` decides what is taken: each step earns a share of its bare time.

    - By default, full steps are always taken, and norms as far as they fit into 3 %. The first 256
      steps, and 64 after an unusual one, have norms on credit.
    - With ``max_overhead``, both come out of this share; the first full step is taken on credit. A
      full step that is not covered stays due. Scalars that the user logs leave less for norms.
    - With ``math.inf``, everything is taken and no clock is read.

    At least one step in 64 has norms.

    All rules share one allowance of requests. It grows with the due full steps, and pauses after
    each request that confirms nothing, so that a fault which begins later still finds a request. An
    alert, or a NaN after finite gradients, restores it. Requests that follow from a full step do
    not count: it shows a candidate. The requested step is the second one after the judged step, or
    a later one if rules are late, so that a repeated run measures the same.

    The training thread calls :meth:`plan` and :meth:`logged`, the worker :meth:`judged` and
    :meth:`request_full`.

    Args:
        every_n_steps: Distance N of the due full steps.
        max_overhead: The share, above 0 and at most 1; None and ``math.inf`` as above.
        log_curves: Called with curves and the number of a full step, when its cost is known.

    Attributes:
        scheduled, requested: Numbers of full steps up to now: due, and added by rules.
        account: Measures the time of telemetry on both threads.
        loss_tag: Tag of the loss; None while unknown.
        takes_all_norms: Whether each step has norms, unless ``max_overhead`` limits them.
    """

    def __init__(
        self,
        every_n_steps: int,
        max_overhead: float | None = None,
        log_curves: Callable[[Mapping[str, float], int], None] = lambda curves, step: None,
    ) -> None:
        _check(every_n_steps, max_overhead)
        self._every, self._log_curves = every_n_steps, log_curves
        self._share = SHARE if max_overhead is None else max_overhead
        self._is_limited = max_overhead is not None and max_overhead < math.inf
        self.account = Account(self._share, pays_full=self._is_limited)
        self.takes_all_norms = max_overhead == math.inf
        self.scheduled = self.requested = 0
        self.loss_tag: str | None = None
        self._loss_limit = math.inf
        # The step in progress.
        self._step = -1
        self._plan: Plan = "skip"
        self._is_due = False  # it is a full step that was due, or one is due still
        self._dense_until: float = math.inf  # norms are requested up to this step
        self._last_norms, self._norms_since = -1, 0  # of steps that have ended
        self._last_full = self._logged_full = -1
        self._requests: deque[int] = deque()  # steps from which on full ones are requested
        # Of the rules. Each attribute has one thread that writes it.
        self._judged_due = self._unconfirmed = self._follow_ups = self._pauses_until = 0
        self._awaited: int | None = None  # the latest requested step, until it is judged
        self._told: set[str] = set()

    def plan(self, step: int) -> Plan:
        """Return what a step measures, when the step before has ended.

        It may be called again until the gradients are read: an unusual loss that was logged in a
        skipped step adds norms to it.
        """
        if step != self._step:
            if self._step >= 0:
                self._end_step()
            self._step = step
            self._plan = "full" if self._has_full(step) else self._norms(step)
        elif self._plan == "skip" and step <= self._dense_until:
            self._plan = self._norms(step)
        # By default a full step is not charged, and has too many blocks to time them for nothing.
        is_charged = self._plan == "norms" and not self.takes_all_norms
        self.account.stopwatch.is_on = self._is_limited or is_charged
        return self._plan

    def _has_full(self, step: int) -> bool:
        self._is_due |= step % self._every == 0
        is_requested = min(tuple(self._requests), default=math.inf) <= step
        if not (self._is_due or is_requested):
            return False
        if self._is_limited and not self.account.covers("full"):
            self._tell(EVERY, f"full steps less often than every {self._every} steps", "full")
            return False
        if is_requested:
            with suppress(IndexError):  # the worker may have cleared them
                self._requests.popleft()
        return True

    def _norms(self, step: int) -> Plan:
        if self._dense_until == math.inf:
            self._dense_until = step + FIRST_STEPS - 1
        is_dense = step <= self._dense_until
        if not self._is_limited and (self.takes_all_norms or is_dense):
            return "norms"
        is_covered = self.account.covers_norms() or (is_dense and self.account.covers("norms"))
        if is_covered or step - self._last_norms >= MAX_NORMS_EVERY:
            self.account.pay_norms()
            return "norms"
        self._tell(NORMS_EVERY, "gradient norms at fewer steps", "norms")
        return "skip"

    def _tell(self, curve: str, what: str, work: Work) -> None:
        """Log once that an interval has increased, and the curve that shows it."""
        if curve in self._told:
            return
        self._told.add(curve)
        level = logging.WARNING if self._is_limited else logging.INFO
        limit = f"max_overhead={self._share:g}"
        if not self._is_limited:
            limit = f"{self._share:.0%} of the time (max_overhead=math.inf: no limit)"
        cost_s, step_s = self.account.cost_s(work), self.account.step_s
        times = f"{cost_s * 1e3:.3g} ms, a step {step_s * 1e3:.3g} ms"
        log.log(
            level, f"telemetry: to stay within {limit}: {what} ({times}); see the curve {curve}"
        )

    def _end_step(self) -> None:
        """Enter the step that has ended."""
        step, plan = self._step, self._plan
        if plan == "full":
            self.scheduled += self._is_due
            self.requested += not self._is_due
            self._is_due, self._last_full = False, step
        if plan != "skip":
            self._last_norms, self._norms_since = step, self._norms_since + 1
        no_clock = self.takes_all_norms and not self._is_limited
        if not no_clock and self.account.step_ended(plan):
            self._log(self._last_full)

    def _log(self, step: int) -> None:
        """Log the distances before a full step, and the overhead up to it."""
        last, self._logged_full = self._logged_full, step
        distance = step - last if last >= 0 else self._every
        norms_every = distance / max(self._norms_since, 1) if last >= 0 else 1.0
        self._norms_since, curves = 0, dict[str, float]()
        if self._is_limited or self._told:
            curves[NORMS_EVERY] = norms_every
        if self._is_limited:
            curves[EVERY] = float(distance)
            if (overhead := self.account.overhead) is not None:
                curves[OVERHEAD] = overhead
        if curves:
            self._log_curves(curves, step)

    # --- requests --------------------------------------------------------------------------------

    def logged(self, step: int, values: Mapping[str, object]) -> bool:
        """Request norms if an unusual loss is among the values; whether it is."""
        loss = values.get(self.loss_tag) if self.loss_tag is not None else None
        if not isinstance(loss, float) or loss <= self._loss_limit:  # false for NaN
            return False
        self._dense_until = max(self._dense_until, step + DENSE_STEPS)
        return True

    def judged(
        self,
        step: int,
        *,
        full: bool,
        confirmed: bool,
        needed: int,
        norms_above: float,
        is_finite: bool = True,
    ) -> int:
        """Take the requests of the rules, which have judged a step; called in order of the steps.

        Args:
            full: Whether it was a full step.
            confirmed: Whether an alert or a new NaN has come since the step before.
            needed: Consecutive full steps that a rule requests, or 0.
            norms_above: Norms are requested for each of the 64 steps after a loss above it.
            is_finite: Whether gradients and loss are. If not, one request is granted until an
                alert confirms it: a broken run is not measured more and more.

        Returns:
            How many full steps the allowance covers; the caller requests them.
        """
        self._loss_limit = norms_above
        if norms_above == -math.inf:
            self._dense_until = max(self._dense_until, step + DENSE_STEPS)
        self._judged_due += step % self._every == 0
        if confirmed:
            self._unconfirmed = self._pauses_until = 0
        if is_answer := full and self._awaited is not None and step >= self._awaited:
            self._awaited = None
        if full and not needed:
            self._requests.clear()
        if not needed or self._awaited is not None:
            return 0
        if is_answer and self._follow_ups < FOLLOW_UPS:
            self._follow_ups, self._awaited = self._follow_ups + 1, step + 1
            return min(needed, IN_A_ROW)
        allowance = ALLOWANCE + ALLOWANCE_SHARE * self._judged_due
        is_spent = self._unconfirmed + 1 > allowance or (self._unconfirmed > 0 and not is_finite)
        if is_spent or step < self._pauses_until:
            return 0
        self._unconfirmed, self._follow_ups, self._awaited = self._unconfirmed + 1, 0, step + 1
        self._pauses_until = step + PAUSE * 2**self._unconfirmed
        return 1

    def request_full(self, step: int, count: int = 1) -> None:
        """Make this step and the next ones full steps, or later ones if they have begun."""
        self._awaited = step + count - 1
        self._requests.extend(range(step, step + count))

    # --- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the plan of the step in progress, the requests and the counters."""
        counts = {name: int(getattr(self, name)) for name in _COUNTS}
        return {"full": self._plan == "full", "requests": [*self._requests], **counts}

    def load_state_dict(self, state: object, step: int) -> None:
        """Restore what :meth:`state_dict` returned, with ``step`` in progress."""
        state = state if isinstance(state, Mapping) else {}
        for name in _COUNTS:
            setattr(self, name, state.get(name, 0))
        full = state.get("full") is True
        self._step, self._plan = step if state else -1, "full" if full else "norms"
        self._requests = deque([max(other, step + 1) for other in state.get("requests", ())])
        self._awaited = max([step] * full + [*self._requests], default=None)


def _check(every_n_steps: int, max_overhead: float | None) -> None:
    share = 1.0 if max_overhead is None else max_overhead
    if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool):
        raise TypeError(f"HookLogger(every_n_steps={every_n_steps!r}): must be an int")
    if not isinstance(share, int | float) or isinstance(share, bool):
        raise TypeError(f"HookLogger(max_overhead={max_overhead!r}): must be a number")
    if every_n_steps < 1:
        raise ValueError(f"HookLogger(every_n_steps={every_n_steps}): must be at least 1")
    if not (0 < share <= 1 or share == math.inf):
        raise ValueError(
            f"HookLogger(max_overhead={max_overhead}): must be above 0 and at most 1; 0.01 is one "
            "percent, math.inf is no limit"
        )


# --- the account ----------------------------------------------------------------------------------

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

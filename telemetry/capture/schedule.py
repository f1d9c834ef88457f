"""Schedule: what each step measures. One account decides what is taken."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any, Literal, TypeAlias, get_args

import torch

log = logging.getLogger("telemetry")

Plan: TypeAlias = Literal["skip", "norms", "full"]
"""What a step measures: nothing, gradient norms, or every tensor."""

Work: TypeAlias = Literal["norms", "full", "logged"]
"""Work of the worker: a step with norms, a full step, logged scalars."""

# Chosen manually.
SHARE = 0.03  # of the bare time, for norms, without ``max_overhead``
NORMS_SHARE = 0.75  # of ``max_overhead``, for norms; the rest remains for full steps
FIRST_STEPS = 256  # which have norms: the baseline is unknown before
DENSE_STEPS = 64  # which have norms after an unusual one: rules may need several
MAX_NORMS_EVERY = 64
SAVED_STEPS = 16  # steps with norms for which the account saves up

# Limit of requests that confirm nothing: a number of them and a share of the due full steps, but
# fewer than due ones.
ALLOWANCE = 3
ALLOWANCE_SHARE = 0.25
FOLLOW_UPS = 2  # that do not count; tried 1 and 3
IN_A_ROW = 2  # full steps of a follow-up, which may need the changes from one to the next; tried 1

_COUNTS = ("scheduled", "requested", "_is_due", "_judged_due", "_unconfirmed", "_follow_ups")


class Schedule:
    """Plans each step: it is skipped, has gradient norms, or is a full step.

    Full steps are due at 0, N, 2N, ... and where rules request one; norms are due at each step. One
    account decides what is taken. Each step earns a share of its bare time, and pays the CPU time
    that measuring takes on the training thread and on the worker, which share the interpreter lock.

    - By default, full steps are always taken, and norms as far as they fit into 3 %. The first 256
      steps, and 64 after an unusual one, have norms on credit.
    - With ``max_overhead``, both come out of this share; the first full step is taken on credit. A
      full step that is not covered stays due. Scalars that the user logs leave less for norms.
    - With ``math.inf``, everything is taken and no clock is read.

    At least one step in 64 has norms. On a CUDA device, which queues work, ``max_overhead`` counts
    the time by which full steps take longer than others. It is measured by events at the ends of
    steps, and entered when the device has reached them, without waiting.

    All rules share one allowance of requests. It grows with the due full steps, so that short runs
    have few others. An alert, or a NaN after finite gradients, restores it. Requests that follow
    from a full step do not count: it shows a candidate. The requested step is the second one after
    the judged step, or a later one if rules are late, so that a repeated run measures the same.

    The training thread calls :meth:`plan` and :meth:`logged`, and measures its own time in ``with``
    blocks of the schedule, which may be nested. The worker calls :meth:`judged`,
    :meth:`request_full` and :meth:`worker_took`.

    Args:
        every_n_steps: Distance N of the due full steps.
        max_overhead: The share, above 0 and at most 1; None and ``math.inf`` as above.
        log_curves: Called with curves and the number of a full step, when its cost is known.

    Attributes:
        scheduled, requested: Numbers of full steps up to now: due, and added by rules.
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
        self._last_full: int | None = None
        self._requests: deque[int] = deque()  # steps from which on full ones are requested
        # Of the rules. Each attribute has one thread that writes it.
        self._judged_due = self._unconfirmed = self._follow_ups = 0
        self._awaited: int | None = None  # the latest requested step, until it is judged
        # The account, in seconds.
        self._own_s = self._bare_s = self._norms_s = self._entered_logged_s = 0.0
        self._worker_s = dict[Work, float].fromkeys(get_args(Work), 0.0)
        self._costs = {
            (work, on_worker): _Mean(size)
            for work, size in (("norms", SAVED_STEPS), ("full", 5), ("logged", SAVED_STEPS))
            for on_worker in (False, True)
        }
        self._steps_s: deque[float] = deque(maxlen=32)  # bare times of other than full steps
        self._told: set[str] = set()
        self._device = torch.device("cpu")
        self._last_s: float | None = None
        self._last_event: torch.cuda.Event | None = None
        self._queued: deque[tuple[int, Plan, torch.cuda.Event]] = deque()
        # The stopwatch.
        self._thread, self._nesting, self._is_timed = threading.get_ident(), 0, self._is_limited
        self._begin_s = self._inside_s = 0.0

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
        self._is_timed = self._is_limited or self._plan == "norms"
        return self._plan

    def _has_full(self, step: int) -> bool:
        self._is_due |= step % self._every == 0
        is_requested = bool(self._requests) and self._requests[0] <= step
        if not (self._is_due or is_requested) or not self._affords_full():
            return False
        if is_requested:
            self._requests.popleft()
        return True

    def _norms(self, step: int) -> Plan:
        if self._dense_until == math.inf:
            self._dense_until = step + FIRST_STEPS - 1
        is_dense = step <= self._dense_until
        if not self._is_limited and (self.takes_all_norms or is_dense):
            return "norms"
        cost_s = self._cost_s("norms")
        is_covered = self._norms_s >= cost_s or (is_dense and self._covers(cost_s))
        if is_covered or step - self._last_norms >= MAX_NORMS_EVERY:
            self._norms_s = max(self._norms_s - cost_s, 0.0)
            return "norms"
        self._tell("norms_every_n_steps", "gradient norms at fewer steps", cost_s)
        return "skip"

    def _affords_full(self) -> bool:
        if not self._is_limited:
            return True
        if any(plan == "full" for _, plan, _ in self._queued):  # its cost is unknown
            return False
        cost_s = self._cost_s("full")
        if not (covered := self._covers(cost_s)):
            what = f"full steps less often than every {self._every} steps"
            self._tell("every_n_steps", what, cost_s)
        return covered

    def _covers(self, cost_s: float) -> bool:
        return self._spent_s + cost_s <= self._share * self._bare_s

    @property
    def _spent_s(self) -> float:
        on_worker_s = self._worker_s["full"] + self._worker_s["norms"]
        return self._own_s + (0.0 if self._device.type == "cuda" else on_worker_s)

    @property
    def _logged_s(self) -> float:
        """Time of logged scalars: on the training thread about as much again."""
        return 2 * self._worker_s["logged"]

    def _cost_s(self, work: Work) -> float:
        """Return the usual cost; at first, the worker probably takes twice the own time."""
        own, worker = self._costs[work, False], self._costs[work, True]
        is_known = worker.values or self._device.type == "cuda"
        return own.value + (worker.value if is_known else 2 * own.value)

    def _tell(self, curve: str, what: str, cost_s: float) -> None:
        """Log once that an interval has increased, and the curve that shows it."""
        if curve in self._told:
            return
        self._told.add(curve)
        limit, hint = f"max_overhead={self._share:g}", ""
        if not self._is_limited:
            limit = f"{self._share:.0%} of the time"
            hint = "; max_overhead=math.inf takes them at each step"
        log.log(
            logging.WARNING if self._is_limited else logging.INFO,
            "telemetry: to stay within %s: %s (%.3g ms, a step %.3g ms); see the curve "
            "telemetry/%s%s",
            limit,
            what,
            cost_s * 1e3,
            median(self._steps_s or [0.0]) * 1e3,
            curve,
            hint,
        )

    # --- the account -----------------------------------------------------------------------------

    def _end_step(self) -> None:
        """Enter the step that has ended."""
        step, plan = self._step, self._plan
        if plan == "full":
            self.scheduled += self._is_due
            self.requested += not self._is_due
            self._is_due = False
        if plan != "skip":
            self._last_norms, self._norms_since = step, self._norms_since + 1
        if self.takes_all_norms and not self._is_limited:
            return
        if self._is_limited and self._device.type == "cuda":
            self._end_on_device(step, plan)
            return
        now, own_s = time.perf_counter(), self._take()
        # The begin of the first step after a start is unknown; its cost is known.
        step_s = own_s if self._last_s is None else now - self._last_s
        self._last_s = now
        self._enter(step, plan, step_s, own_s)

    def _end_on_device(self, step: int, plan: Plan) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._queued.append((step, plan, event))
        while self._queued and self._queued[0][-1].query():
            step, plan, event = self._queued.popleft()
            before, self._last_event = self._last_event, event
            step_s = before.elapsed_time(event) * 1e-3 if before is not None else 0.0
            usual_s = median(self._steps_s or [step_s])
            self._enter(step, plan, step_s, max(step_s - usual_s, 0.0) if plan == "full" else 0.0)

    def _enter(self, step: int, plan: Plan, step_s: float, own_s: float) -> None:
        bare_s = max(step_s - own_s, 0.0)
        self._own_s += own_s
        self._bare_s += bare_s
        earned_s = self._share * bare_s
        if self._is_limited:
            logged_s = self._logged_s
            earned_s = NORMS_SHARE * earned_s - (logged_s - self._entered_logged_s)
            self._entered_logged_s = logged_s
        most_s = SAVED_STEPS * self._cost_s("norms")
        self._norms_s = min(max(self._norms_s + earned_s, -most_s), most_s)
        if plan != "skip":
            self._costs[plan, False].add(own_s)
        if plan != "full":
            self._steps_s.append(bare_s)
            return
        last, self._last_full = self._last_full, step
        distance = self._every if last is None else step - last
        norms_every = 1.0 if last is None else distance / max(self._norms_since, 1)
        self._norms_since, curves = 0, {}
        if self._is_limited or self._told:
            curves["norms_every_n_steps"] = norms_every
        if self._is_limited:
            curves["every_n_steps"] = float(distance)
            if self._bare_s > 0:  # else the time of bare training is unknown
                curves["overhead"] = (self._spent_s + self._logged_s) / self._bare_s
        if curves:
            self._log_curves({f"telemetry/{name}": value for name, value in curves.items()}, step)

    def measure(self, device: torch.device) -> None:
        """Measure steps on this device from here on."""
        self._device = device

    def restart(self) -> None:
        """Begin the step in progress now; the time before it belongs to no step."""
        self._last_s = self._last_event = None
        self._queued.clear()
        self._take()

    # --- requests --------------------------------------------------------------------------------

    def logged(self, step: int, values: Mapping[str, object]) -> bool:
        """Request norms if an unusual loss is among the values; whether it is."""
        loss = values.get(self.loss_tag) if self.loss_tag is not None else None
        if not isinstance(loss, float) or loss <= self._loss_limit:  # false for NaN
            return False
        self._dense_until = max(self._dense_until, step + DENSE_STEPS)
        return True

    def judged(
        self, step: int, *, full: bool, confirmed: bool, needed: int, norms_above: float
    ) -> int:
        """Take the requests of the rules, which have judged a step; called in order of the steps.

        Args:
            full: Whether it was a full step.
            confirmed: Whether an alert or a new NaN has come since the step before.
            needed: Consecutive full steps that a rule requests, or 0.
            norms_above: Norms are requested for each of the 64 steps after a loss above it.

        Returns:
            How many full steps the allowance covers; the caller requests them.
        """
        self._loss_limit = norms_above
        if norms_above == -math.inf:
            self._dense_until = max(self._dense_until, step + DENSE_STEPS)
        self._judged_due += step % self._every == 0
        if confirmed:
            self._unconfirmed = 0
        if is_answer := full and self._awaited is not None and step >= self._awaited:
            self._awaited = None
        if full and not needed:
            self._requests.clear()
        if not needed or self._awaited is not None:
            return 0
        if is_answer and self._follow_ups < FOLLOW_UPS:
            self._follow_ups += 1
            return min(needed, IN_A_ROW)
        allowance = ALLOWANCE + ALLOWANCE_SHARE * self._judged_due
        if self._unconfirmed + 1 > min(allowance, max(self._judged_due - 1, 1)):
            return 0
        self._unconfirmed, self._follow_ups = self._unconfirmed + 1, 0
        return 1

    def request_full(self, step: int, count: int = 1) -> None:
        """Make this step and the next ones full steps, or later ones if they have begun."""
        self._awaited = step + count - 1
        self._requests.extend(range(step, step + count))

    def worker_took(self, work: Work, seconds: float) -> None:
        """Add CPU time of the worker, which calls this, for one step or scalar."""
        self._worker_s[work] += seconds
        self._costs[work, True].add(seconds)

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

    # --- the stopwatch ---------------------------------------------------------------------------

    def __enter__(self) -> None:
        if not self._is_timed or threading.get_ident() != self._thread:
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


class _Mean:
    """Mean of the last values, at most ``size``."""

    def __init__(self, size: int) -> None:
        self.value, self._total = 0.0, 0.0
        self.values: deque[float] = deque(maxlen=size)

    def add(self, value: float) -> None:
        values = self.values
        self._total += value - (values[0] if len(values) == values.maxlen else 0.0)
        values.append(value)
        self.value = self._total / len(values)


def _check(every_n_steps: object, max_overhead: object) -> None:
    if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool):
        raise TypeError(f"HookLogger(every_n_steps={every_n_steps!r}): must be an int")
    if every_n_steps < 1:
        raise ValueError(f"HookLogger(every_n_steps={every_n_steps}): must be at least 1")
    if max_overhead is None:
        return
    if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool):
        raise TypeError(f"HookLogger(max_overhead={max_overhead!r}): must be a number")
    if not (0 < max_overhead <= 1 or max_overhead == math.inf):
        raise ValueError(
            f"HookLogger(max_overhead={max_overhead}): must be above 0 and at most 1; 0.01 is one "
            "percent, math.inf is no limit"
        )

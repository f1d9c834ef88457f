"""Limits telemetry's own cost: which due steps are measured, and how many of the layers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

LONGEST_STRETCH = 10
"""Largest multiple of the interval asked for; beyond it, a measurement takes some layers only."""

MAX_PARTS = 32
"""Numbers of parts are powers of two, so that layers keep their turns when the number changes."""

NORMS_SHARE = 0.5
"""Share of the budget for the gradient norms of steps that are not measured in full."""

_STEPS_REMEMBERED = 32
_MEASUREMENTS_REMEMBERED = 5


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The layers of one measurement: every ``parts``-th, beginning with ``first``."""

    parts: int = 1
    first: int = 0

    def takes(self, layer: int) -> bool:
        """Whether the measurement includes the layer with this number."""
        return layer % self.parts == self.first


class Stopwatch:
    """CPU time that the thread that made it spends inside of ``with`` blocks."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._nesting = 0
        self._begin_s = 0.0
        self._total_s = 0.0

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
            self._total_s += time.thread_time() - self._begin_s

    def take(self) -> float:
        """Seconds since the last call; may be called inside of a block. From then on it counts the
        caller's thread."""
        if threading.get_ident() != self._thread:
            self._thread, self._nesting = threading.get_ident(), 0
        elif self._nesting:
            now = time.thread_time()
            self._total_s += now - self._begin_s
            self._begin_s = now
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class Budget:
    """Keeps telemetry within a share of the time of bare training.

    It keeps an account: each step earns ``max_overhead`` of the time that training itself took, and
    telemetry's work is paid from that. A measurement that is due waits until the account covers
    it. The first one is taken on credit and paid back before the second. If measurements would be
    more than ten times as rare as asked for, each takes only a part of the layers, in turn. The
    gradient norms of other steps may take half of the budget, and are skipped beyond that.

    Args:
        max_overhead: The share, such as 0.01.
        every_n_steps: The interval between measurements if the budget allows it.

    Raises:
        TypeError: ``max_overhead`` is not a number.
        ValueError: ``max_overhead`` is not above 0 and at most 1.

    Attributes:
        entered: Called with this and the number of each step that was measured in full, when its
            cost is known; does nothing until it is set.
    """

    def __init__(self, *, max_overhead: float, every_n_steps: int) -> None:
        if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool):
            raise TypeError(f"HookLogger(max_overhead={max_overhead!r}): must be a number")
        if not 0 < max_overhead <= 1:
            raise ValueError(
                f"HookLogger(max_overhead={max_overhead}): must be above 0 and at most 1; "
                "0.01 is one percent"
            )
        self._share = max_overhead
        self._every_n_steps = every_n_steps
        self.entered: Callable[[Budget, int], None] = lambda budget, step: None
        self._own_s = 0.0
        self._bare_s = 0.0
        self._norms_s = 0.0
        self._norms_taken = 0
        self._norms_skipped = 0
        self._parts = 1
        self._turns = 0
        self._turn = Turn()
        self._unsettled = False
        self._last_full: int | None = None
        self._interval = every_n_steps
        # Times of the last steps that were not measured in full.
        self._bare_steps_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._light_own_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        # Of the last full measurements, what all layers would have cost.
        self._full_own_s: deque[float] = deque(maxlen=_MEASUREMENTS_REMEMBERED)
        self._reported = False

    def affords_full(self) -> bool:
        """Whether the account covers a full measurement of the next step."""
        if self._unsettled:
            return False
        if not self._full_own_s:
            return True
        return self._own_s + self._usual_full_s() <= self._share * self._bare_s

    def affords_norms(self) -> bool:
        """Whether the account covers the gradient norms of a step that is not measured in full."""
        usual_s = self._norms_s / max(self._norms_taken, 1)
        return self._norms_s + usual_s <= NORMS_SHARE * self._share * self._bare_s

    def begin_full(self, layers: int) -> Turn:
        """Begin a full measurement; returns which of the layers it takes.

        Its cost is unknown until the step is :meth:`completed`, which may be later on an
        accelerator. Until then no other full measurement is affordable.
        """
        self._unsettled = True
        parts = min(self._parts, max(layers, 1))
        self._turn = Turn(parts=parts, first=self._turns % parts)
        self._turns += 1
        return self._turn

    def completed(
        self, step: int, *, full: bool, norms: bool = True, step_s: float, own_s: float | None
    ) -> None:
        """Enter a finished step into the account.

        Args:
            step: Its number.
            full: Whether it was measured in full.
            norms: Whether at least its gradient norms were taken.
            step_s: Time since the step before, including telemetry's.
            own_s: Telemetry's part of it. None if it cannot be measured, as on an accelerator: then
                it is by how much the step took longer than others usually do.
        """
        if own_s is None:
            usual_s = median(self._bare_steps_s) if self._bare_steps_s else step_s
            own_s = max(step_s - usual_s, 0.0) if full else 0.0
        bare_s = max(step_s - own_s, 0.0)
        self._own_s += own_s
        self._bare_s += bare_s
        if not full:
            self._bare_steps_s.append(bare_s)
            self._light_own_s.append(own_s)
            self._norms_taken += norms
            self._norms_skipped += not norms
            self._norms_s += own_s
            if self._last_full == step - 1:
                self._fit_parts()  # by now it is known what a step earns
            return
        self._unsettled = False
        if self._last_full is not None:
            self._interval = step - self._last_full
        self._last_full = step
        self._full_own_s.append(own_s * self._turn.parts)
        self._fit_parts()
        self.entered(self, step)

    def scalars(self) -> Mapping[str, float]:
        """The overhead so far, relative to bare training, and the latest interval.

        The overhead is missing before the second step: the time of bare training is unknown then.
        """
        scalars = {"telemetry/every_n_steps": float(self._interval)}
        if self._bare_s > 0:
            scalars["telemetry/overhead"] = self._own_s / self._bare_s
        return scalars

    def news(self) -> str | None:
        """A sentence about how the budget changes what is measured; None after the first time."""
        interval = max(self._interval, self._usual_interval())
        changes = []
        if self._interval > self._every_n_steps or self._parts > 1:
            layers = f"one in {self._parts} layers at a time, in turn"
            changes.append(
                f"measuring about every {interval} steps instead of every {self._every_n_steps}"
                + (f", {layers}" if self._parts > 1 else "")
            )
        if self._norms_skipped > self._norms_taken:
            steps = round((self._norms_skipped + self._norms_taken) / max(self._norms_taken, 1))
            changes.append(f"gradient norms about every {steps} steps")
        if self._reported or not changes:
            return None
        self._reported = True
        return f"to stay within max_overhead={self._share:g}: {'; '.join(changes)}"

    def _fit_parts(self) -> None:
        """Choose the number of parts that makes measurements frequent enough."""
        longest = LONGEST_STRETCH * self._every_n_steps
        while self._parts < MAX_PARTS and self._usual_interval() > longest:
            self._parts *= 2
        # With a margin, so that scattering costs do not switch back and forth.
        while self._parts > 1 and 3 * self._usual_interval() < longest:
            self._parts //= 2

    def _usual_full_s(self) -> float:
        """Usual cost of a measurement with the present number of parts."""
        return median(self._full_own_s) / self._parts

    def _usual_interval(self) -> int:
        """How many steps earn the cost of a measurement."""
        if not self._bare_steps_s or not self._full_own_s:
            return self._every_n_steps
        earned_s = self._share * median(self._bare_steps_s) - fmean(self._light_own_s)
        never = LONGEST_STRETCH * MAX_PARTS * self._every_n_steps
        if earned_s <= 0:
            return never
        return min(max(ceil(self._usual_full_s() / earned_s), self._every_n_steps), never)


def budget_of(max_overhead: float | None, every_n_steps: int) -> Budget | None:
    """The budget with this limit; None if there is no limit."""
    if max_overhead is None:
        return None
    return Budget(max_overhead=max_overhead, every_n_steps=every_n_steps)

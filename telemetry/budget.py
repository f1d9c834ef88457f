"""A budget for telemetry's own cost: when to measure what, and how many of the layers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

LONGEST_STRETCH = 10
"""Times the interval asked for. What would take longer is measured in parts instead."""

MAX_PARTS = 32
"""A power of two, as is every number of parts: so that layers keep their turns when it changes."""

NORMS_SHARE = 0.5
"""Of the budget, for the gradient norms that are taken at steps that are not measured in full."""

_STEPS_REMEMBERED = 32
_MEASUREMENTS_REMEMBERED = 5


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The layers that one measurement takes: every ``parts``-th, beginning with ``first``."""

    parts: int = 1
    first: int = 0

    def takes(self, layer: int) -> bool:
        """Whether it is the turn of the layer with this number."""
        return layer % self.parts == self.first


class Stopwatch:
    """CPU time that one thread spends inside of ``with`` blocks: the one that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._depth = 0
        self._begin_s = 0.0
        self._total_s = 0.0

    def __enter__(self) -> None:
        if threading.get_ident() != self._thread:
            return
        if self._depth == 0:
            self._begin_s = time.thread_time()
        self._depth += 1

    def __exit__(self, *exception: object) -> None:
        if threading.get_ident() != self._thread or self._depth == 0:
            return
        self._depth -= 1
        if self._depth == 0:
            self._total_s += time.thread_time() - self._begin_s

    def take(self) -> float:
        """Seconds since the last call, which may be inside of a block; counts the caller's thread
        from now on."""
        if threading.get_ident() != self._thread:
            self._thread, self._depth = threading.get_ident(), 0
        elif self._depth:
            now = time.thread_time()
            self._total_s += now - self._begin_s
            self._begin_s = now
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class Budget:
    """Keeps telemetry within a share of the time of bare training.

    It keeps an account: each step earns ``max_overhead`` of the time that training itself took, and
    what telemetry did is paid from that. A measurement that is due waits until there is enough for
    it. The first one is taken on credit, and paid back before the second. Where measurements would
    come more than ten times as rarely as asked for, each takes a part of the layers only, in turn.
    The gradient norms of other steps may take half of the budget, and are skipped beyond that.

    Args:
        max_overhead: The share, such as 0.01.
        every_n_steps: The interval between measurements while the budget allows it.
        entered: Called with the number of each step that was measured in full, once its cost is
            known.

    Raises:
        TypeError: ``max_overhead`` is no number.
        ValueError: It is not above 0 and at most 1.
    """

    def __init__(
        self,
        *,
        max_overhead: float,
        every_n_steps: int,
        entered: Callable[[int], None] = lambda step: None,
    ) -> None:
        if not isinstance(max_overhead, int | float) or isinstance(max_overhead, bool):
            raise TypeError(f"HookLogger(max_overhead={max_overhead!r}): must be a number")
        if not 0 < max_overhead <= 1:
            raise ValueError(
                f"HookLogger(max_overhead={max_overhead}): must be above 0 and at most 1; "
                "0.01 is one percent"
            )
        self._share = max_overhead
        self._every_n_steps = every_n_steps
        self._entered = entered
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
        # Of the last steps that were not measured in full.
        self._bare_steps_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._light_own_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        # Of the last that were, what all layers would have cost.
        self._full_own_s: deque[float] = deque(maxlen=_MEASUREMENTS_REMEMBERED)
        self._told = False

    def affords_full(self) -> bool:
        """Whether there is enough for measuring the next step in full."""
        if self._unsettled:
            return False
        if not self._full_own_s:
            return True
        return self._own_s + self._usual_full_s() <= self._share * self._bare_s

    def affords_norms(self) -> bool:
        """Whether there is enough for the gradient norms of a step that is not measured in full."""
        usual_s = self._norms_s / max(self._norms_taken, 1)
        return self._norms_s + usual_s <= NORMS_SHARE * self._share * self._bare_s

    def begin_full(self, layers: int) -> Turn:
        """A step that is measured in full begins: which of so many layers to take.

        Until it is :meth:`completed`, which may be later where an accelerator does the work, there
        is no telling what it costs, and nothing else is affordable.
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
            step_s: Time since the step before, telemetry included.
            own_s: What of it was telemetry's. None where that cannot be told apart, as on an
                accelerator: then it is what the step took longer than others usually do.
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
        self._entered(step)

    def scalars(self) -> Mapping[str, float]:
        """What was spent so far, relative to bare training, and the interval it led to.

        Before the second step there is no telling how long training takes by itself.
        """
        scalars = {"telemetry/every_n_steps": float(self._interval)}
        if self._bare_s > 0:
            scalars["telemetry/overhead"] = self._own_s / self._bare_s
        return scalars

    def news(self) -> str | None:
        """Once, when the budget has changed what is measured: how, in words."""
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
        if self._told or not changes:
            return None
        self._told = True
        return f"to stay within max_overhead={self._share:g}: {'; '.join(changes)}"

    def _fit_parts(self) -> None:
        """Have as many parts as it takes to measure often enough."""
        longest = LONGEST_STRETCH * self._every_n_steps
        while self._parts < MAX_PARTS and self._usual_interval() > longest:
            self._parts *= 2
        # Not back at once when costs scatter.
        while self._parts > 1 and 3 * self._usual_interval() < longest:
            self._parts //= 2

    def _usual_full_s(self) -> float:
        """What a measurement like the last ones costs, with as many layers as it would have now."""
        return median(self._full_own_s) / self._parts

    def _usual_interval(self) -> int:
        """Steps that earn as much."""
        if not self._bare_steps_s or not self._full_own_s:
            return self._every_n_steps
        earned_s = self._share * median(self._bare_steps_s) - fmean(self._light_own_s)
        never = LONGEST_STRETCH * MAX_PARTS * self._every_n_steps
        if earned_s <= 0:
            return never
        return min(max(ceil(self._usual_full_s() / earned_s), self._every_n_steps), never)

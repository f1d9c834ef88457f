"""A budget for telemetry's own cost: when to measure in full, and how many of the layers."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median

LONGEST_STRETCH = 10
"""Times the interval asked for. What would take longer is measured in parts instead."""

MAX_PARTS = 32

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
    """CPU time that the calling thread spends inside of ``with`` blocks; blocks must not nest."""

    def __init__(self) -> None:
        self._total_s = 0.0

    def __enter__(self) -> None:
        self._begin_s = time.thread_time()

    def __exit__(self, *exception: object) -> None:
        self._total_s += time.thread_time() - self._begin_s

    def take(self) -> float:
        """Seconds since the last call."""
        total_s, self._total_s = self._total_s, 0.0
        return total_s


class Budget:
    """A schedule under which telemetry takes no more than a share of the time of bare training.

    It keeps an account: each step earns ``max_overhead`` of the time that training itself took, and
    what telemetry did is paid from that, the norms of every step included. A measurement that is
    due waits until there is enough for it. The first one is taken on credit, and paid back before
    the second. Where measurements would come more than ten times as rarely as asked for, each takes
    a part of the layers only, in turn.

    Args:
        max_overhead: The share, such as 0.01.
        every_n_steps: The interval while the budget allows it.

    Raises:
        TypeError: ``max_overhead`` is no number.
        ValueError: It is not above 0 and at most 1.
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
        self._own_s = 0.0
        self._bare_s = 0.0
        self._turn = Turn()
        self._last_full: int | None = None
        self._interval = every_n_steps
        # Of the last steps that were not measured in full, and of the last that were.
        self._bare_steps_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._light_own_s: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._full_own_s: deque[float] = deque(maxlen=_MEASUREMENTS_REMEMBERED)
        self._told = False

    def __call__(self, step: int) -> bool:
        """Whether ``step`` is to be measured in full; see :class:`telemetry.schedule.Schedule`."""
        if step % self._every_n_steps:
            return False
        if not self._full_own_s:
            return True
        return self._own_s + median(self._full_own_s) <= self._share * self._bare_s

    @property
    def turn(self) -> Turn:
        """Which layers the next measurement takes."""
        return self._turn

    def completed(self, step: int, *, full: bool, step_s: float, own_s: float | None) -> None:
        """Enter a finished step into the account.

        Args:
            step: Its number.
            full: Whether it was measured in full.
            step_s: Wall time since the step before, telemetry included.
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
            return
        if self._last_full is not None:
            self._interval = step - self._last_full
        self._last_full = step
        self._full_own_s.append(own_s)
        self._next_turn()

    def scalars(self) -> Mapping[str, float]:
        """What was spent so far, relative to bare training, and the interval it led to."""
        return {
            "telemetry/overhead": self._own_s / self._bare_s if self._bare_s else 0.0,
            "telemetry/every_n_steps": float(self._interval),
        }

    def news(self) -> str | None:
        """Once, when the budget has changed what is measured: how, in words."""
        if self._told or (self._interval <= self._every_n_steps and self._turn.parts == 1):
            return None
        self._told = True
        layers = (
            f", one in {self._turn.parts} layers at a time, in turn" if self._turn.parts > 1 else ""
        )
        return (
            f"to stay within max_overhead={self._share:g}, measuring about every "
            f"{max(self._interval, self._usual_interval())} steps instead of every "
            f"{self._every_n_steps}{layers}"
        )

    def _next_turn(self) -> None:
        """Let the next layers come, in as many parts as the budget asks for."""
        longest = LONGEST_STRETCH * self._every_n_steps
        before = self._turn.parts
        parts = min(max(ceil(before * self._usual_interval() / longest), 1), MAX_PARTS)
        if parts == before:
            self._turn = Turn(parts=parts, first=(self._turn.first + 1) % parts)
            return
        self._turn = Turn(parts=parts)
        scale = before / parts
        self._full_own_s = deque((s * scale for s in self._full_own_s), _MEASUREMENTS_REMEMBERED)

    def _usual_interval(self) -> int:
        """Steps that earn what a measurement like the last ones costs."""
        if not self._bare_steps_s:
            return self._every_n_steps
        earned_s = self._share * median(self._bare_steps_s) - median(self._light_own_s)
        never = LONGEST_STRETCH * MAX_PARTS * self._every_n_steps
        if earned_s <= 0:
            return never
        return min(max(ceil(median(self._full_own_s) / earned_s), self._every_n_steps), never)

"""Decides which optimizer steps are measured in full.

:mod:`telemetry.capture.budget` may postpone a measurement.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

STEPS_AT_ONCE = 8
"""Rules are shown so many of the steps that are not measured in full at a time: between two steps
of training our code has left the core's cache, and one step alone takes twice as long."""

ROWS_AT_ONCE = 64
"""As long as they hold nothing that a rule would note, so many are processed at a time."""

LAG_STEPS = 2 * STEPS_AT_ONCE
"""What rules say of a step decides whether the step so many later is measured in full; half of the
time is left for them to answer."""

SOON_STEPS = 1
"""The same for the first steps of a run, and where the gradients' norm has jumped."""

_FIRST_STEPS = 8
_JUMP = 5.0  # as of exploding_gradient
_FADE = 0.98  # a norm counts for a third after a hundred steps
_SETTLED = 10  # steps until the norm of the first ones says something
_SAME_JUMP = 30  # steps

_PATIENCE_S = 5.0
_PATIENCE_SHARE = 0.05

Schedule: TypeAlias = Callable[[int], bool]
"""Whether a step is measured in full. The answer must be the same on all ranks."""


def every(n: int) -> Schedule:
    """Steps 0, n, 2n, ...

    Raises:
        TypeError: ``n`` is not an ``int``.
        ValueError: ``n`` is below 1.
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"HookLogger(every_n_steps={n!r}): must be an int")
    if n < 1:
        raise ValueError(f"HookLogger(every_n_steps={n}): must be at least 1")
    return lambda step: step % n == 0


class FullSteps:
    """Which steps are measured in full: those that are due, and those that a rule asks for.

    Rules judge a step on another thread, early or late as that finds time. Their answer decides
    about one certain later step all the same, which is known beforehand: so what is measured
    depends on the steps alone, and a run that is repeated gives the same alerts.

    At that step the training thread waits for an answer that is not there yet: for five seconds at
    most, and for no more than a twentieth of the run's time. If it still is not there, it decides
    about the next step after it comes. Where the norms are on an accelerator when a step ends,
    nobody waits.

    Args:
        due: The steps that are due in any case.

    Attributes:
        waits: How often the training thread has waited.
        waited_s: For how long altogether.
        announce: Set where several ranks train together: called with a step after which rules want
            a full measurement, to name one to all ranks. Nobody waits for rules then.
    """

    def __init__(self, due: Schedule) -> None:
        self.waits = 0
        self.waited_s = 0.0
        self.announce: Callable[[int], None] | None = None
        self._due = due
        self._asked: set[int] = set()
        self._soon: set[int] = set()
        self._answered = -1
        # Steps at which an answer has to be there, ascending, and to which step's judgement.
        self._awaited: deque[tuple[int, int]] = deque()
        self._is_waiting = False
        self._answers = threading.Condition()
        self._credit_s = _PATIENCE_S
        self._credit_at = time.monotonic()
        self._pid = os.getpid()
        self._usual_square = 0.0
        self._norms_seen = 0

    # --- on the training thread ----------------------------------------------------------------

    def __call__(self, step: int) -> bool:
        """Whether the step is measured in full; to be asked in the order of the steps."""
        is_due = self._due(step)
        if self._awaited and self._awaited[0][0] <= step and not is_due:
            self._wait(step)
        is_asked = False
        for asked in tuple(self._asked):
            if asked <= step:
                self._asked.discard(asked)
                is_asked = True
        return is_due or is_asked

    def is_soon(self, step: int) -> bool:
        """Whether what rules say of the step is needed soon."""
        return step < _FIRST_STEPS or step in self._soon

    def see(self, step: int, square: float) -> None:
        """Note the square of the norm of all gradients; after a jump, rules are asked soon."""
        self._norms_seen += 1
        if not square <= _JUMP**2 * self._usual_square and self._norms_seen > _SETTLED:
            self._soon.update((step, step + 1, step + 2))
            self._norms_seen = _SETTLED - _SAME_JUMP
        if square < math.inf:
            self._usual_square = max(square, _FADE * self._usual_square)

    def expect(self, first: int, last: int) -> None:
        """The rules were given the steps from ``first`` to ``last``, all that they need there."""
        if self.announce is not None:
            return
        at = last + SOON_STEPS if self.is_soon(last) else first + LAG_STEPS
        while self._awaited and self._awaited[-1][0] >= at:
            self._awaited.pop()
        self._awaited.append((at, last))

    def _wait(self, step: int) -> None:
        last = -1
        while self._awaited and self._awaited[0][0] <= step:
            last = self._awaited.popleft()[1]
        if self._answered >= last or os.getpid() != self._pid:
            return
        began = time.monotonic()
        earned_s = _PATIENCE_SHARE * (began - self._credit_at)
        self._credit_s = min(_PATIENCE_S, self._credit_s + earned_s)
        with self._answers:
            self._is_waiting = True
            self._answers.wait_for(lambda: self._answered >= last, self._credit_s)
            self._is_waiting = False
        self._credit_at = time.monotonic()
        self._credit_s -= self._credit_at - began
        self.waits += 1
        self.waited_s += self._credit_at - began

    # --- on the thread of the rules ------------------------------------------------------------

    def answer(self, step: int, *, wanted: bool) -> None:
        """The rules have judged all steps up to this one.

        Args:
            step: The step.
            wanted: Whether they want a full measurement after it.
        """
        if wanted and self.announce is not None:
            self.announce(step)
        elif wanted:
            self._asked.add(step + (SOON_STEPS if self.is_soon(step) else LAG_STEPS))
        self._soon.discard(step)
        self._answered = max(step, self._answered)
        if self._is_waiting:
            with self._answers:
                self._answers.notify_all()

    # --- between steps -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is known of later steps, in numbers and lists."""
        return {
            "asked": sorted(self._asked),
            "soon": sorted(self._soon),
            "usual_square": self._usual_square,
            "norms_seen": self._norms_seen,
        }

    def ask(self, step: int) -> None:
        """Have a step measured in full."""
        self._asked.add(step)

    def load_state_dict(self, state: object) -> None:
        """Go on from there, if it is such a state."""
        state = state if isinstance(state, Mapping) else {}
        self._asked = set(state.get("asked", ()))
        self._soon = set(state.get("soon", ()))
        self._usual_square = state.get("usual_square", 0.0)
        self._norms_seen = state.get("norms_seen", 0)
        self._awaited.clear()
        self._answered = -1

"""Selects the steps at which gradient norms are taken, where steps are very short."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median

log = logging.getLogger("telemetry")

SHARE = 0.025  # of the training time, for the worker; the training thread takes a fifth as much

# Chosen manually, in steps.
FIRST_STEPS = 256  # norms are taken at each of them: the baseline is unknown before
MAX_EVERY = 64
DECISION_STEPS = 16  # steps with norms between decisions on the interval
DENSE_STEPS = 64  # after an unusual step: rules may need several to confirm a finding


class LightSteps:
    """Limits gradient norms and rules to 3 % of the time: norms at one step in ``every``.

    Full steps are not affected. After an unusual step, norms are taken at each of the next 64
    steps. A loss is compared with its limit when it is logged. If it is logged before the
    optimizer's step, the norms of that step are taken too.

    The training thread calls :meth:`have_norms` and :meth:`check_logged`; the worker decides.

    Args:
        limited: Whether the limit holds; if not, norms are taken at every step.

    Attributes:
        limited: False as well where a rule judges every step.
        every: 1 for steps of more than a few milliseconds.
        loss_tag: Tag of the loss; None while unknown.
        loss_limit: Losses above it are unusual.
    """

    def __init__(self, *, limited: bool = True) -> None:
        self.every = 1
        self.loss_tag: str | None = None
        self.loss_limit = math.inf
        self.limited = limited
        self._dense_until = -1
        self._costs_s: deque[float] = deque(maxlen=DECISION_STEPS)
        self._steps_s: deque[float] = deque(maxlen=DECISION_STEPS)
        self._last: tuple[int, float] | None = None  # number and time of the last step
        self._undecided = FIRST_STEPS  # steps with norms until the next decision

    def have_norms(self, step: int) -> bool:
        """Whether the gradient norms of this step are taken."""
        return step % self.every == 0 or step <= self._dense_until

    def check_logged(self, step: int, values: Mapping[str, object]) -> bool:
        """Whether the values hold an unusual loss; then norms of the next 64 steps are taken."""
        loss = values.get(self.loss_tag) if self.loss_tag is not None else None
        if not isinstance(loss, float) or loss <= self.loss_limit:  # false for NaN
            return False
        self.take_next(step)
        return True

    def take_next(self, step: int) -> None:
        """Take the norms of each of the next 64 steps."""
        self._dense_until = max(self._dense_until, step + DENSE_STEPS)

    def add(self, step: int, wall_time: float, cost_s: float) -> None:
        """Add the worker's CPU time for one step; from time to time update ``every``."""
        if self._last is not None and step > self._last[0]:
            self._steps_s.append((wall_time - self._last[1]) / (step - self._last[0]))
        self._last = step, wall_time
        self._costs_s.append(cost_s)
        self._undecided -= 1
        if self._undecided > 0 or not self.limited or not self._steps_s:
            return
        self._undecided = DECISION_STEPS
        step_s = max(median(self._steps_s), 1e-6)
        every = min(math.ceil(median(self._costs_s) / (SHARE * step_s)), MAX_EVERY)
        if every > 1 and self.every == 1:
            log.info(
                "telemetry: steps take %.2g ms, so gradient norms are taken at one in %d, to stay "
                "within 3 %% of the time; max_overhead=math.inf takes them at each step; see the "
                "curve telemetry/norms_every_n_steps",
                step_s * 1e3,
                every,
            )
        self.every = max(every, 1)

"""How all ranks raise at the end of the same optimizer step.

If one rank raised alone, the others would wait for it in their next collective. And no rank can
tell where the others are: they are at most a step apart while the loop's collectives hold them
together, but on a GPU the Python code runs ahead of these. So the step is agreed on, in two rounds:

1. The first rank tells all to hold. From then on, no rank's training thread passes the end of the
   step that it is in; it waits there. On each rank the background thread answers with the number of
   that step, at once: the training thread may be in a collective that needs a rank which already
   waits.
2. When all have answered, the first rank announces the largest of these numbers. All that wait go
   on, up to the end of that step, and raise there.

No rank has passed that step before it knows the number, as each promised to stop no later than
there. And each gets there, as the others go on to there, too, and take part in its collectives.

A rank that has died or hangs does not answer; after ten seconds the number is chosen without it. If
it comes back later, it raises at once. If the first rank itself goes, those that wait go on after
thirty seconds, and say so. Steps at which no alert is to be raised cost the look at one attribute.
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("telemetry")

HOLD_S = 30.0
ANSWER_S = 10.0


class Agreement:
    """One rank's part: its training thread asks at the end of each step, another thread decides."""

    def __init__(self, first_step: int = 0) -> None:
        self._ended = first_step - 1
        self._holding = False
        self._raise_at: int | None = None
        self._decided = threading.Event()
        self._over = False

    def step_ended(self, step: int | None) -> bool:
        """Whether to raise now, after this step; the training thread may wait while all agree.

        None: training has ended, no other step will.
        """
        self._ended = self._ended if step is None else step
        return self._holding and not self._over and self._is_reached(step)

    def hold(self) -> int | None:
        """Make the training thread stop at the end of its step; returns that step, once."""
        if self._holding:
            return None
        # The order matters: if the training thread passes the end of a step because it looks before
        # the first line, then it has noted that step before, and the second line sees it.
        self._holding = True
        return self._ended + 1

    def decide(self, raise_at: int | None) -> None:
        """Let the training thread go on, to raise at the end of this step; None: never."""
        self._raise_at = raise_at
        self._decided.set()

    def _is_reached(self, step: int | None) -> bool:
        if not self._decided.wait(HOLD_S):
            log.warning(
                "telemetry: the first rank was about to have all raise an alert and went silent; "
                "training goes on"
            )
            self._raise_at = None
        elif self._raise_at is not None and step is not None and step < self._raise_at:
            return False
        self._over = True
        return self._raise_at is not None


class Vote:
    """The first rank's part: collects the answers and chooses the step."""

    def __init__(self, now: float) -> None:
        self._began = now
        self._ranks: frozenset[int] = frozenset()
        self._latest = -1
        self.decided: int | None = None

    def add(self, ranks: frozenset[int], step: int) -> None:
        """These ranks will not pass the end of this step."""
        self._ranks |= ranks
        self._latest = max(self._latest, step)

    def choose(self, members: frozenset[int], now: float) -> bool:
        """Choose the step if all members have answered or had their time; whether it is new."""
        late = now - self._began > ANSWER_S
        if self.decided is not None or self._latest < 0 or not (late or members <= self._ranks):
            return False
        self.decided = self._latest
        return True

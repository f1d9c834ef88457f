"""How all ranks raise at the end of the same optimizer step.

If one rank raised alone, the others would wait for it in their next collective. And no rank can
tell where the others are: they are at most a step apart while the loop's collectives hold them
together, but on a GPU the Python code runs ahead of these. So the first rank's news say what is to
be raised. From then on, no rank's training thread passes the end of the step that it is in, and its
background thread answers with the number of that step, at once: the training thread may be in a
collective that needs a rank which already waits. When every live rank has answered, the news name
the largest of these numbers, and all go on up to the end of that step, and raise there.

No rank has passed that step before it knows the number, as each promised to stop no later than
there. And each gets there, as the others go on to there, too, and take part in its collectives.

After ten seconds the number is chosen without who has died or hangs; one that comes back raises at
once. If the first rank itself goes, those that wait go on after thirty seconds, and say so. Steps
at which no alert is to be raised cost the look at one attribute.
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
        self._holding = self._over = False
        self._raise_at: int | None = None
        self._decided = threading.Event()

    def step_ended(self, step: int | None) -> bool:
        """Whether to raise now, after this step; the training thread may wait while all agree.

        None: training has ended, no other step will.
        """
        self._ended = self._ended if step is None else step
        if not self._holding or self._over:
            return False
        if not self._decided.wait(HOLD_S):
            log.warning(
                "telemetry: the first rank was about to have all raise an alert and went silent; "
                "training goes on"
            )
        elif self._raise_at is not None and step is not None and step < self._raise_at:
            return False
        self._over = True
        return self._raise_at is not None

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

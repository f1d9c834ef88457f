"""Barrier at which all ranks raise an alert at the end of the same optimizer step.

If one rank raised alone, the others would block in their next collective. So rank 0 announces the
alert. From then on, no training thread passes the end of its current step, and each rank's
background thread answers with the number of that step: at once, because the training thread may be
in a collective that needs a rank which already waits. When every live rank has answered, rank 0
announces the largest number. All continue to the end of that step, and raise there: none has passed
it, because each one promised to stop no later.

After ten seconds rank 0 decides without the ranks that have not answered; one that returns raises
at once. If rank 0 itself goes, waiting ranks continue after thirty seconds, and log it.
"""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("telemetry")

WAIT_S = 30.0
ANSWER_S = 10.0


class Barrier:
    """One rank's side: its training thread asks at the end of each step, another thread decides."""

    def __init__(self, first_step: int = 0) -> None:
        self._ended = first_step - 1
        self._closed = self._over = False
        self._raise_at: int | None = None
        self._decided = threading.Event()

    def step_ended(self, step: int | None) -> bool:
        """Whether to raise now, after this step; blocks between :meth:`close` and :meth:`decide`.

        None: training has ended, no other step will.
        """
        self._ended = self._ended if step is None else step
        if not self._closed or self._over:
            return False
        if not self._decided.wait(WAIT_S):
            log.warning(
                "telemetry: rank 0 was about to raise an alert on all ranks and became "
                "unresponsive; training continues"
            )
        elif self._raise_at is not None and step is not None and step < self._raise_at:
            return False
        self._over = True
        return self._raise_at is not None

    def close(self) -> int:
        """Stop the training thread at the end of its step; return the number of that step."""
        # The order matters: a training thread that passes the end of a step, because it checks
        # before the first line, has noted that step before, and the second line reads it.
        if not self._closed:
            self._closed = True
            self._closed_at = self._ended + 1
        return self._closed_at

    def decide(self, raise_at: int | None) -> None:
        """Let the training thread continue, to raise at the end of this step; None: never."""
        self._raise_at = raise_at
        self._decided.set()

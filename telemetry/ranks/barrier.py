"""Barrier at which the training threads of all ranks raise an alert at the end of the same step."""

from __future__ import annotations

import logging
import threading

log = logging.getLogger("telemetry")

# Time for rank 0 to decide.
BARRIER_S = 30.0


class Barrier:
    """Barrier at which all ranks raise an alert at the end of the same step; one rank's side.

    If one rank raised alone, the others would block in their next collective. So each rank's
    exchange closes the barrier: its training thread does not pass the end of its current step, and
    rank 0 receives its number. The exchange does not wait for the training thread, which may
    be in a collective that needs a rank which already waits. Rank 0 decides for the largest number.
    Every rank continues to the end of that step and raises there, as none has passed it.

    Rank 0 ignores ranks that do not answer in 10 s; these raise as soon as they can. If
    rank 0 does not decide in :data:`BARRIER_S`, training continues.
    """

    def __init__(self, first_step: int = 0) -> None:
        self._ended = first_step - 1
        self._closed = self._over = False
        self._raise_at: int | None = None
        self._decided = threading.Event()

    def step_ended(self, step: int | None) -> bool:
        """Return whether to raise now, after this step; wait if the barrier is closed.

        None: training has ended.
        """
        self._ended = self._ended if step is None else step
        if not self._closed or self._over:
            return False
        if not self._decided.wait(BARRIER_S):
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
        # First closed, then read: a training thread that was not stopped has noted its step before.
        if not self._closed:
            self._closed = True
            self._closed_at = self._ended + 1
        return self._closed_at

    def decide(self, raise_at: int | None) -> None:
        """Let the training thread continue, to raise at the end of this step; None: never."""
        self._raise_at = raise_at
        self._decided.set()

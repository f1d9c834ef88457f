"""Tells which ranks the records of a run lack: once when they go, and once when they return."""

from __future__ import annotations

import logging

from telemetry.ranks.gathering import Gathering
from telemetry.ranks.part import named

log = logging.getLogger("telemetry")


class Attendance:
    """What the first rank has said about others.

    Args:
        world_size: How many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._missed: set[int] = set()
        self._back: set[int] = set()
        self._elsewhere: set[int] = set()

    def check(self, step: int, ranks: frozenset[int], gathering: Gathering) -> None:
        """Log what is new at a step of which these ranks are there."""
        absent, silent = gathering.never_joined - ranks, gathering.silent - ranks
        self._tell_missed(step, ranks, absent, "made no HookLogger for this run so far")
        self._tell_missed(step, ranks, silent, "sent nothing in time and may hang or have died")
        back = (self._missed & ranks) - self._back
        if back:
            self._back |= back
            log.warning(
                "telemetry: from step %d on, the records hold what %s measured", step, named(back)
            )
        others = gathering.members - ranks - self._elsewhere
        if others:
            self._elsewhere |= others
            log.warning(
                "telemetry: step %d was measured by %s, and not by %s; use the same every_n_steps "
                "on all ranks", step, named(ranks), named(others),
            )  # fmt: skip

    def _tell_missed(
        self, step: int, ranks: frozenset[int], missed: frozenset[int], reason: str
    ) -> None:
        new = missed - self._missed
        if new:
            self._missed |= new
            log.warning(
                "telemetry: from step %d on, the records hold %d of %d ranks: %s %s",
                step, len(ranks), self._world_size, named(new), reason,
            )  # fmt: skip

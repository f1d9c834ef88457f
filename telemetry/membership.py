"""Whether a process trains together with others, and what it does for their common run."""

from __future__ import annotations

from collections.abc import Callable

from telemetry.arguments import Options
from telemetry.events.background import each_within
from telemetry.failures import Failures
from telemetry.first_rank import Role, role_of
from telemetry.pipeline import Pipeline, Processor
from telemetry.rank_processing import RankProcessor
from telemetry.ranks.observer import RankObserver
from telemetry.run_files import RunFiles


class Membership:
    """Joins the ranks that train together, as soon as there are any.

    Args:
        role: What this process does, as far as that is known.
        options: What the user asked for.
        files: Are opened for the role.
        pipeline: Gives steps to the other ranks from then on.
        processor: Judges and writes what ranks have merged, on the one that writes.
        current_step: Says which step is in progress.
        failures: Where failures are reported.

    Attributes:
        role: Likewise.
        ranks: What exchanges steps with the other ranks; None: nothing is exchanged.
    """

    def __init__(
        self,
        role: Role,
        *,
        options: Options,
        files: RunFiles,
        pipeline: Pipeline,
        processor: Processor,
        current_step: Callable[[], int],
        failures: Failures,
    ) -> None:
        self.role = role
        self.ranks: RankProcessor | None = None
        self._options = options
        self._files = files
        self._pipeline = pipeline
        self._processor = processor
        self._current_step = current_step
        self._failures = failures

    def join(self) -> None:
        """Do what the role says, which is final."""
        role = self.role
        self._files.open_for(role)
        if role.merges:
            self.ranks = RankProcessor(
                rank=role.rank,
                size=role.size,
                recorder=self._processor if role.writes else None,
                full_steps=self._options.full_steps,
                current_step=self._current_step,
                failures=self._failures,
                loss=self._processor.loss,
            )
            self._pipeline.processor = self.ranks
        elif not role.measures:
            self._pipeline.ignore_all()

    def find(self) -> RankObserver | None:
        """Join the others, if that was not possible before; nothing has been measured so far."""
        if self.ranks is None and self.role.size == 1:
            self.role = role_of(self._options.ranks)
            self.join()
        return None if self.ranks is None else self.ranks.observer

    def decide(self) -> None:
        """If nobody has told so far who writes, this process does."""
        if self._files.is_undecided:
            with self._failures.contained("to open its files"):
                self.find()

    def await_steps(self, timeout_s: float) -> None:
        """Wait until the rules have seen all steps so far, those of all ranks included."""
        waits: list[Callable[[float], None]] = [self._pipeline.flush]
        if self.ranks is not None and not self._pipeline.on_own_thread():
            waits += [self.ranks.wait, self._pipeline.flush]
        each_within(timeout_s, *waits)

    def end_exchange(self, timeout_s: float) -> None:
        """Send what other ranks lack, and have what they sent."""
        if self.ranks is not None and self.role.measures:
            self._pipeline.in_turn(self.ranks.send_rest)
            self.ranks.close(timeout_s / 2)

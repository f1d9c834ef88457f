"""A process's part among those that train together: who writes, and who stops at an alert."""

from __future__ import annotations

from collections.abc import Callable

from telemetry.alert import Alert, TelemetryAlert
from telemetry.arguments import OnAlert, Options
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


class AlertResponse:
    """Does what ``on_alert`` asks for.

    Args:
        on_alert: As in :class:`telemetry.HookLogger`.
        pipeline: Its thread calls the user's function; nothing is raised there.
        membership: Knows the ranks that train together; they stop at the same step.

    Attributes:
        should_stop: As :attr:`telemetry.HookLogger.should_stop`.
    """

    def __init__(self, on_alert: OnAlert, pipeline: Pipeline, membership: Membership) -> None:
        self._on_alert = on_alert
        self._pipeline = pipeline
        self._membership = membership
        self._pending: Alert | None = None
        self.should_stop = False

    def note(self, alert: Alert) -> None:
        """Call the user's function; or remember the first alert that is to stop training."""
        if callable(self._on_alert):
            self._on_alert(alert)
            return
        stops = self._on_alert is not None and alert.stage != "end" and alert.severity != "note"
        if stops and self._pending is None:
            self._pending = alert
            if (ranks := self._membership.ranks) is not None:
                ranks.raise_together(alert)

    def act(self) -> None:
        """Stop training if an alert is to, and this process is alone.

        Raises:
            TelemetryAlert: There is such an alert, and the user asked for ``"raise"``.
        """
        alert, alone = self._pending, self._membership.ranks is None
        if alert is not None and alone and not self._pipeline.on_own_thread():
            self._pending = None
            self._stop(alert)

    def step_ended(self, step: int | None) -> None:
        """Likewise at the end of a step, where ranks that train together all do so.

        Args:
            step: Its number; None: training has ended.
        """
        ranks = self._membership.ranks
        if ranks is not None and (alert := ranks.to_raise(step)) is not None:
            self._stop(alert)
        if self._pending is not None:
            self.act()

    def _stop(self, alert: Alert) -> None:
        if self._on_alert == "raise":
            raise TelemetryAlert(alert)
        self.should_stop = True

"""What follows from an alert: the user's function is called, or training is to stop."""

from __future__ import annotations

from telemetry.alert import Alert, TelemetryAlert
from telemetry.arguments import OnAlert
from telemetry.membership import Membership
from telemetry.pipeline import Pipeline


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

"""Keeps the last steps in memory, and writes them to a file when something goes wrong."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from telemetry.alert import Alert, TelemetryAlert
from telemetry.events.plain_files import write_whole
from telemetry.failures import Failures
from telemetry.flight.document import MAX_ALERTS, Flight, compose, describe
from telemetry.flight.file import encode_flight, flight_path
from telemetry.flight.snapshot import Snapshot, detail, snapshot
from telemetry.records import StepRecord

log = logging.getLogger("telemetry")

MAX_STEP_BYTES = 4 * 2**20
MAX_DETAIL_BYTES = 12 * 2**20
MAX_FILES = 8

_RECORDED = {"loss_spike"}
"""Kinds of alerts of severity ``warning`` for which a file is written, too."""

_DETAILS = 16
"""Full measurements that are kept of ``steps`` steps at most, besides the latest two."""


class FlightRecorder:
    """Keeps the last steps; writes ``<log_dir>/flight-<step>.json`` at a fault.

    It keeps the gradient norms of all modules, loss and learning rates of each step, and the
    sketches of full measurements, in at most 16 MiB (4 MiB and 12 MiB; the latest two of each are
    always kept, and so are three of the fault that is being recorded).
    :mod:`telemetry.flight.document` describes the file, which is at most 8 MiB large.

    A file is written at an alert of severity ``error``, at a loss spike, and when an exception ends
    the training. It is completed with the steps that follow after a quarter of ``steps``, or at
    :meth:`close`; errors until then become part of it. A run writes at most 8 files, for its first
    failures.

    Call :meth:`on_step` with each record before the rules judge it. Nothing here raises; failures
    are logged once. Calls may come from several threads.

    Args:
        log_dir: Where files are written; none are written to a remote one (``"s3://..."``).
        steps: Number of steps that are kept.
        seed: Of torch's generator, to be written to the file.
        failures: Where failures are reported.
        write: Writes a whole file; by default at once, on the caller's thread.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        *,
        steps: int = 200,
        seed: int | None = None,
        failures: Failures | None = None,
        write: Callable[[Path, bytes], None] = write_whole,
    ) -> None:
        if steps < 1:
            raise ValueError(f"FlightRecorder(steps={steps}): must be at least 1")
        self._log_dir = os.fspath(log_dir)
        self._count = steps
        self._seed = seed
        self._failures = failures or Failures()
        self._write_file = write
        self._lock = threading.Lock()
        self._steps: deque[Snapshot] = deque()
        self._step_bytes = 0
        self._details: deque[Snapshot] = deque()
        self._alerts: deque[Alert] = deque(maxlen=MAX_ALERTS)
        self._flight: Flight | None = None
        self._files: set[Path] = set()

    # --- what happens --------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        """A step was recorded."""
        with self._contained():
            step = snapshot(record)
            self._keep(step)
            if record.full:
                step = replace(step, detail=detail(record))
                self._keep_detail(step)
            self._follow_fault(step)

    def on_alert(self, alert: Alert) -> None:
        """A rule has found something."""
        with self._contained():
            is_warned = alert.severity == "warning" and alert.kind in _RECORDED
            is_recorded = (alert.severity == "error" or is_warned) and alert.stage != "end"
            self._alerts.append(alert)
            if self._flight is not None:
                self._flight.alerts.append(alert)
            elif is_recorded:
                self._begin(alert.step)
            if is_recorded:
                self._write(complete=False)

    def on_exception(self, exception: BaseException, step: int) -> None:
        """The training ends in an exception, during ``step``.

        Exceptions that were asked for are no fault: Ctrl-C, :class:`SystemExit`,
        :class:`TelemetryAlert`.
        """
        if isinstance(exception, Exception) and not isinstance(exception, TelemetryAlert):
            with self._contained():
                if self._flight is None:
                    self._begin(step)
                assert self._flight is not None
                self._flight.exception = describe(exception)
                self._write(complete=False)

    def close(self) -> None:
        """Complete the file that was begun, if any; harmless when repeated."""
        with self._contained():
            self._complete()

    @property
    def nbytes(self) -> int:
        """Approximate memory."""
        return sum(s.nbytes for s in (*self._steps, *self._details))

    # --- under the lock ------------------------------------------------------------------------

    @contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except OSError:
            self._failures.report(f"to write a flight file into {self._log_dir}")
        except Exception:
            self._failures.report("to keep the last steps")

    def _keep(self, step: Snapshot) -> None:
        if len(self._steps) == self._count:
            self._step_bytes -= self._steps.popleft().nbytes
        self._steps.append(step)
        # A running count: to sum over all at every step would be most of the work.
        self._step_bytes = _shrink(self._steps, self._step_bytes + step.nbytes, MAX_STEP_BYTES)

    def _follow_fault(self, step: Snapshot) -> None:
        """Add a step to the flight that was begun, if any."""
        flight = self._flight
        if flight is None:
            return
        if flight.at is None or flight.at.step < step.step <= flight.step:
            flight.at = step  # the alert came with the loss, before its step was recorded
            flight.last_full = step if step.full else flight.last_full
        if step.step >= flight.step + max(1, self._count // 4):
            self._complete()

    def _keep_detail(self, step: Snapshot) -> None:
        kept = self._details
        # The latest one is replaced unless it is far from the one before it.
        if len(kept) >= 2 and kept[-1].step - kept[-2].step < self._count / _DETAILS:
            kept.pop()
        kept.append(step)
        _shrink(kept, sum(step.nbytes for step in kept), MAX_DETAIL_BYTES)
        while len(kept) > 2 and kept[1].step <= step.step - self._count:
            kept.popleft()

    def _begin(self, step: int) -> None:
        oldest = self._steps[0].step if self._steps else step
        at = last_full = self._details[-1] if self._details else None
        if self._steps and (at is None or at.step < self._steps[-1].step):
            at = self._steps[-1]
        earlier = [s for s in self._details if s.step <= step - self._count // 4]
        earlier = earlier[-1:] or [s for s in (*self._details, *self._steps) if s is not at]
        before = earlier[0] if earlier and at is not None and earlier[0].step < at.step else None
        alerts = [alert for alert in self._alerts if alert.step >= oldest]
        self._flight = Flight(step=step, before=before, at=at, last_full=last_full, alerts=alerts)

    def _complete(self) -> None:
        if self._flight is not None:
            try:
                self._write(complete=True)
            finally:
                self._flight = None

    def _write(self, *, complete: bool) -> None:
        assert self._flight is not None
        if "://" in self._log_dir:
            message = f"flight files are not written to {self._log_dir}"
            self._failures.log_once(message, level=logging.INFO)
            return
        path = flight_path(Path(self._log_dir), self._flight.step)
        if path not in self._files and len(self._files) >= MAX_FILES:
            return
        steps = list(self._steps)
        latest = self._details[-1] if self._details else None
        if latest is not None and steps and latest.step == steps[-1].step:
            steps[-1] = latest
        contents = compose(self._flight, steps, seed=self._seed, complete=complete)
        self._write_file(path, encode_flight(contents))
        if path not in self._files:
            self._files.add(path)
            log.warning(
                "telemetry: the steps before the fault at step %d are in %s",
                self._flight.step,
                path,
            )


def _shrink(kept: deque[Snapshot], nbytes: int, max_bytes: int) -> int:
    """Drop the oldest, except the latest two, until the rest fits; returns its bytes."""
    while len(kept) > 2 and nbytes > max_bytes:
        nbytes -= kept.popleft().nbytes
    return nbytes

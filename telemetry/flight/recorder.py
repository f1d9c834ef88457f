"""Flight recorder: keeps the last steps in memory, and writes them to a file at a fault."""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from telemetry.alert import Alert, TelemetryAlert
from telemetry.events.plain_files import write_whole
from telemetry.failures import Failures
from telemetry.flight.file import MAX_ALERTS, Fault, KeptStep, encode_flight
from telemetry.layers import table
from telemetry.records import StepRecord
from telemetry.records.batches import RecentBatches
from telemetry.untrusted import MAX_TEXT

log = logging.getLogger("telemetry")

MAX_STEP_BYTES = 4 << 20
MAX_FULL_BYTES = 12 << 20
MAX_FILES = 8

# Kinds of alerts of severity ``warning`` for which a file is written, too.
_RECORDED = {"loss_spike"}

# Full steps kept of ``steps`` steps, in addition to the latest two.
_FULL_STEPS = 16


class FlightRecorder:
    """Keep the last steps; write ``<log_dir>/flight-<step>.json`` at a fault.

    It keeps gradient norms of all modules, loss and learning rates of each step, and the statistics
    of all layers of full steps, in 16 MiB at most: 4 MiB and 12 MiB, but always the latest two of
    each, and three of the fault that is being recorded. :mod:`telemetry.flight.file` describes the
    file.

    An alert of severity ``error``, a loss spike, or an exception that ends training writes a file.
    It is completed with the next steps after a quarter of ``steps``, or at :meth:`close`; errors
    until then are added to it. A run writes 8 files at most, for its first faults, and none into a
    remote directory.

    Call :meth:`on_step` with each record before the rules judge it. Methods do not raise; failures
    are logged once. Calls may come from several threads. ``batches`` are those of the last steps,
    which the worker adds.
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
        self.batches = RecentBatches()
        self._log_dir = os.fspath(log_dir)
        self._count = steps
        self._seed = seed
        self._failures = failures or Failures()
        self._write_file = write
        self._lock = threading.Lock()
        self._steps: deque[KeptStep] = deque(maxlen=steps)
        self._full: deque[KeptStep] = deque(maxlen=_FULL_STEPS + 2)
        self._alerts: deque[Alert] = deque(maxlen=MAX_ALERTS)
        self._fault: Fault | None = None
        self._files: set[Path] = set()

    # --- events --------------------------------------------------------------------------------

    def on_step(self, record: StepRecord) -> None:
        with self._contained():
            self._steps.append(kept := KeptStep.of(record))
            _shrink(self._steps, MAX_STEP_BYTES)
            if record.full:
                states = record.random_states
                self._keep_full(kept._replace(table=table(record), random_states=states))
            if self._fault is not None:
                self._follow_fault(self._fault)

    def on_alert(self, alert: Alert) -> None:
        """Record an alert, and write a file at a fault."""
        with self._contained():
            is_warned = alert.severity == "warning" and alert.kind in _RECORDED
            is_recorded = (alert.severity == "error" or is_warned) and alert.stage != "resolved"
            self._alerts.append(alert)
            if self._fault is not None:
                self._fault.alerts.append(alert)
            elif is_recorded:
                self._begin(alert.step)
            if is_recorded:
                self._write(complete=False)

    def on_exception(self, exception: BaseException, step: int) -> None:
        """Record the exception that ends training, during ``step``, if it is a fault."""
        if is_fault(exception):
            with self._contained():
                if self._fault is None:
                    self._begin(step)
                assert self._fault is not None
                self._fault.exception = _described(exception)
                self._write(complete=False)

    def close(self) -> None:
        """Complete the unfinished file, if any; idempotent."""
        with self._contained():
            self._complete()

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in (*self._steps, *self._full))

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

    def _keep_full(self, step: KeptStep) -> None:
        kept = self._full
        # Replace the latest one unless it is far from the one before it.
        if len(kept) >= 2 and kept[-1].step - kept[-2].step < self._count / _FULL_STEPS:
            kept.pop()
        kept.append(step)
        _shrink(kept, MAX_FULL_BYTES)

    def _latest(self) -> KeptStep | None:
        """The last step, with its table if it was a full step."""
        if not self._steps:
            return None
        return self._full[-1] if self._steps[-1].full else self._steps[-1]

    def _follow_fault(self, fault: Fault) -> None:
        """Add the last step to the fault that is being recorded."""
        step = self._latest()
        assert step is not None
        if fault.at is None or fault.at.step < step.step <= fault.step:
            fault.at = step  # the alert preceded the record of its step
            fault.last_full = step if step.table is not None else fault.last_full
        if step.step >= fault.step + max(1, self._count // 4):
            self._complete()

    def _begin(self, step: int) -> None:
        at = self._latest()
        last_full = self._full[-1] if self._full else None
        earlier = [s for s in self._full if s.step <= step - self._count // 4][-1:]
        before = next(iter(earlier or [*self._full, *self._steps]), None)
        if before is not None and at is not None and before.step >= at.step:
            before = None
        oldest = self._steps[0].step if self._steps else step
        alerts = [alert for alert in self._alerts if alert.step >= oldest]
        self._fault = Fault(
            step=step,
            before=before,
            at=at,
            last_full=last_full,
            alerts=alerts,
            batches=self.batches.of(step),
        )

    def _complete(self) -> None:
        if self._fault is not None:
            try:
                self._write(complete=True)
            finally:
                self._fault = None

    def _write(self, *, complete: bool) -> None:
        assert self._fault is not None
        if "://" in self._log_dir:
            message = f"flight files are not written to {self._log_dir}"
            self._failures.log_once(message, level=logging.INFO)
            return
        path = Path(self._log_dir, f"flight-{self._fault.step}.json")
        if path not in self._files and len(self._files) >= MAX_FILES:
            return
        steps, latest = list(self._steps), self._latest()
        text = encode_flight(self._fault, steps, latest, seed=self._seed, complete=complete)
        self._write_file(path, text)
        if path not in self._files:
            self._files.add(path)
            log.warning("telemetry: the last steps up to step %d are in %s", self._fault.step, path)


def is_fault(exception: BaseException) -> bool:
    """Return whether an exception that ends training is unexpected.

    Ctrl-C, :class:`SystemExit`, :class:`StopIteration` and :class:`TelemetryAlert` are requested.
    """
    requested = StopIteration, TelemetryAlert
    return isinstance(exception, Exception) and not isinstance(exception, requested)


def _described(exception: BaseException) -> dict[str, str]:
    """Return an exception as text; the object would keep the training loop's frames alive."""
    lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
    return {
        "type": type(exception).__qualname__,
        "message": str(exception)[:MAX_TEXT],
        "traceback": "".join(lines)[-MAX_TEXT:],
    }


def _shrink(kept: deque[KeptStep], most_bytes: int) -> None:
    """Drop the oldest, except the latest two, until the rest fits.

    It assumes that all are as large as the newest: adding up their sizes at every step is slow.
    """
    most = max(2, most_bytes // kept[-1].nbytes)
    while len(kept) > most:
        kept.popleft()

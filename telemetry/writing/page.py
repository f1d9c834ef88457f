"""Values of records and alerts for the Telemetry page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events import page_format, summaries
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.layers import MATRIX_STATISTICS, MISSING, OPTIONAL_STATISTICS, Statistic, table
from telemetry.layers.table import PLACES
from telemetry.layers.units import encode_units, with_parts
from telemetry.records import Layout, StepRecord

# The writer adds up to a second, so a step is in the file after at most two seconds.
_BLOCK_S = 0.75


class PageWriter:
    """Turns the records of one run, in order of steps, into values of events.

    The gradient norms of other than full steps are collected, and yielded as one block after
    0.75 s. If no step arrives by then, the caller requests the rest: see :meth:`pending_s` and
    :meth:`pending_values`. ``layout`` and ``last_step`` are those of the latest record.
    """

    def __init__(self, session_id: str | None = None) -> None:
        self._first_session = self._session = session_id or page_format.new_session_id()
        self._restarts = 0
        self.layout: Layout | None = None
        self._has_alerts = False
        self._columns = MATRIX_STATISTICS
        self._layout_number = -1
        self._written: dict[page_format.ChunkKind, int] = {}
        self._pending: list[StepRecord] = []  # whose gradient norms are not written yet
        self.last_step = 0

    def pending_s(self, now: float) -> float | None:
        """Return the seconds until :meth:`pending_values` is due; None if nothing is pending.

        ``now`` is in seconds since the epoch.
        """
        if not self._pending:
            return None
        # 0 if the clock was set back.
        return max(0.0, _BLOCK_S - abs(now - self._pending[0].wall_time))

    def begins_layout(self, record: StepRecord) -> bool:
        """Whether the record's event includes a layout, which all later values need."""
        return not record.phase and record.layout is not self.layout

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """Yield the values to write in an event with the record's step; none for a phase.

        If the step is not a later one, as after a restored checkpoint, a new session begins.
        """
        if record.phase:
            return
        restarted = self.layout is not None and record.step <= self.last_step
        if restarted or record.layout is not self.layout:
            yield from self._norms(record.step, in_new_tag=restarted)
            if restarted:
                self._restart()
            optional = [s for s in OPTIONAL_STATISTICS if s.measured_in and s.measured_in(record)]
            self._columns = MATRIX_STATISTICS + tuple(optional)
            yield self._begin_layout(record.layout)
        self.last_step = record.step
        self._pending.append(record)
        nbytes = len(self._pending) * record.grad_norms.size * np.dtype(np.float32).itemsize
        is_large = nbytes >= page_format.NORM_BLOCK_BYTES
        if record.full or is_large or self.pending_s(record.wall_time) == 0:
            yield from self.pending_values()
        if record.full:
            yield self._numbers("m", _matrix(record, self._columns))
            if units := encode_units(with_parts(record, table(record).outputs)):
                yield self._numbers("u", units)

    def pending_values(self) -> Iterator[bytes]:
        """Yield the values that were held back, to write in an event with :attr:`last_step`."""
        return self._norms(self.last_step)

    def alert_value(self, alert: Alert, number: int) -> bytes:
        self._has_alerts = True
        tag = page_format.alert_tag(self._session, number)
        return _value(tag, page_format.encode_alert(alert))

    def loss_value(self, tag: str) -> bytes | None:
        """Return the tag of the loss as a value of any event; None before the first record."""
        if self.layout is None:
            return None
        return _value(page_format.loss_tag(self._session, tag), b"")

    def end_value(self, exception: BaseException | None) -> bytes | None:
        """Return the end of the run, to write in an event with :attr:`last_step`.

        None if there is neither a step nor an alert. ``exception``: the training raised it.
        """
        if self.layout is None and not self._has_alerts:
            return None
        return _value(page_format.end_tag(self._session), page_format.encode_end(exception))

    def _norms(self, step: int, *, in_new_tag: bool = False) -> Iterator[bytes]:
        if not self._pending:
            return
        if in_new_tag:  # steps must ascend within a tag
            self._written["n"] += page_format.EVENTS_PER_TAG
        records, self._pending = self._pending, []
        yield self._numbers("n", _norm_block(records, step))

    def _restart(self) -> None:
        self._restarts += 1
        # Sorts before any session that begins later elsewhere.
        self._session = f"{self._first_session}.{self._restarts:04d}"
        self._layout_number = -1

    def _begin_layout(self, layout: Layout) -> bytes:
        self.layout = layout
        self._layout_number += 1
        self._written = {"m": 0, "n": 0, "u": 0}
        content = page_format.encode_layout(layout, self._columns)
        tag = page_format.layout_tag(self._session, self._layout_number)
        return _value(tag, content)

    def _numbers(self, kind: page_format.ChunkKind, values: NDArray[np.float32] | bytes) -> bytes:
        chunk = page_format.Chunk(
            kind=kind,
            session=self._session,
            layout=self._layout_number,
            number=self._written[kind] // page_format.EVENTS_PER_TAG,
        )
        self._written[kind] += 1
        return _value(chunk.tag, values)


def _norm_block(records: Sequence[StepRecord], step: int) -> NDArray[np.float32]:
    """Return a row for each record: its step minus ``step``, then the norm of each gradient.

    :data:`MISSING` without a gradient and at a step that a ``GradScaler`` skipped.
    """
    norms = np.array([record.grad_norms for record in records])
    # A finite gradient whose norm is beyond float32 must not look infinite.
    finite = np.array([record.grad_finite for record in records])
    norms = np.where(finite, np.minimum(norms, FLOAT32_MAX), norms)
    present = np.array([record.grad_present & (not record.skipped) for record in records])
    distance = np.array([[record.step - step] for record in records], np.float32)
    return np.concatenate([distance, as_float32(np.where(present, norms, MISSING))], axis=1)


def _value(tag: str, content: NDArray[np.float32] | bytes) -> bytes:
    return summaries.tensor(tag, content, page_format.PLUGIN_NAME)


def _matrix(record: StepRecord, columns: Sequence[Statistic]) -> NDArray[np.float32]:
    layers = table(record)
    places = [PLACES[statistic.name] for statistic in columns]
    return as_float32(np.where(layers.known, layers.values, MISSING)[:, places])


def as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return values rounded to float32; finite numbers beyond it become its largest."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    infinite = np.isinf(narrow)
    if infinite.any():
        narrow[infinite & np.isfinite(values)] = FLOAT32_MAX
    return narrow

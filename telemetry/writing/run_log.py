"""Frames of a run log, made of records, alerts and logged values."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events.message_pack import encode
from telemetry.events.run_log import (
    MAX_RATES,
    Alerted,
    Begin,
    End,
    Failure,
    Frame,
    FullStep,
    Hyperparameters,
    LaidOut,
    Logged,
    LossFound,
    Norms,
    Random,
)
from telemetry.events.summaries import FLOAT32_MAX
from telemetry.layers import MATRIX_STATISTICS, MISSING, OPTIONAL_STATISTICS, Statistic, table
from telemetry.layers.table import PLACES
from telemetry.layers.units import encode_units, with_parts
from telemetry.records import Layout, StepRecord
from telemetry.records.batches import RecentBatches
from telemetry.records.tensor import Tensors
from telemetry.untrusted import MAX_TEXT


class RunLog:
    """Writer of one logger's run log, in the order of steps.

    The file begins with the first frame, so that a checkpoint may be restored before. ``run``
    identifies the run, of which this logger writes a part.

    Args:
        put: Appends the data of a frame to the file, without waiting for the disk; it takes
            ``droppable`` and ``flush``.
        repeat: Begins each further file of this logger with the latest data of each key.
    """

    def __init__(
        self,
        put: Callable[..., None],
        repeat: Callable[[str, bytes], None],
        *,
        run: str,
        seed: int | None = None,
    ) -> None:
        self.run = run
        self.batches = RecentBatches()
        self._layout: Layout | None = None  # of the latest step
        self._put, self._repeat = put, repeat
        self._seed = seed
        self._first_step = 0
        self._has_begun = False
        self._made_s = time.time()
        self._statistics: tuple[Statistic, ...] = MATRIX_STATISTICS
        self._random: Random | None = None  # of the last full step

    def begin(self, step: int, run: str | None = None) -> None:
        """Hide what the run holds of this step and later ones; ``run``: of a checkpoint."""
        self.run = run or self.run
        self._first_step = step
        self._layout = None
        self._has_begun = False

    def step(self, record: StepRecord) -> None:
        """Write a step of training, and what a full one has measured."""
        if record.phase:
            return
        step, time_s = record.step, record.wall_time
        if record.layout is not self._layout:
            self._layout = record.layout
            optional = [s for s in OPTIONAL_STATISTICS if s.measured_in and s.measured_in(record)]
            self._statistics = MATRIX_STATISTICS + tuple(optional)
            names = [statistic.name for statistic in self._statistics]
            self._write_needed(LaidOut(step, time_s, record.layout, names))
        self._write(
            Norms(
                step,
                time_s,
                norms=memoryview(_norms(record).tobytes()),
                total=record.total_grad_norm,
                learning_rates=record.learning_rates[:MAX_RATES],
                loss=record.loss,
                loss_scale=record.loss_scale,
                skipped=record.skipped,
            ),
            droppable=True,
        )
        if record.full:
            states = record.random_states
            self._random = Random(step, dict(states)) if states else None
            units = encode_units(with_parts(record, table(record).outputs))
            values = memoryview(_table(record, self._statistics).tobytes())
            tensors = (record.outputs, record.output_grads, record.grads, record.weights)
            estimated = any(bool(Tensors.of(of).rows.estimated.any()) for of in tensors)
            frame = FullStep(step, time_s, values, memoryview(units), estimated)
            self._write(frame, droppable=True)

    def alert(self, alert: Alert, time_s: float) -> None:
        """Write an alert; of a fault also the random state and the batch of its step."""
        frame = Alerted(alert.step, time_s, alert)
        if frame.is_fault:
            batches = self.batches.of(alert.step)
            frame = Alerted(alert.step, time_s, alert, batches, self._random)
        self._write(frame, flush=True)

    def logged(self, step: int, time_s: float, values: Mapping[str, float]) -> None:
        """Write logged scalars, and curves of the run."""
        self._write(Logged(step, time_s, dict(values)))

    def loss(self, tag: str, delay: int, step: int) -> None:
        """Write which scalar is the loss."""
        self._write_needed(LossFound(max(step, 0), time.time(), tag, delay))

    def hyperparameters(self, values: Mapping[str, str | float | bool], step: int) -> None:
        self._write_needed(Hyperparameters(step, time.time(), dict(values)))

    def end(
        self, last_step: int, exception: BaseException | None, full_steps: tuple[int, int] = (0, 0)
    ) -> None:
        """Write the end of the run, if it has begun; ``exception``: the training raised it."""
        if not self._has_begun and exception is None:
            return
        failure = None if exception is None else _failure(exception)
        step = max(last_step + (exception is not None), 0)
        batches = self.batches.of(step) if failure else ()
        random = self._random if failure else None
        frame = End(max(last_step, 0), time.time(), failure, batches, random, full_steps)
        self._write(frame, flush=True)

    def _write_needed(self, frame: Frame) -> None:
        """Write a frame that readers need in each file."""
        self._repeat(type(frame).__name__, self._write(frame))

    def _write(self, frame: Frame, *, droppable: bool = False, flush: bool = False) -> bytes:
        if not self._has_begun:
            self._has_begun = True
            begin = Begin(self._first_step, self._made_s, self.run, self._seed)
            self._put(encode(begin))
            further = Begin(begin.step, begin.time_s, self.run, self._seed, continues=True)
            self._repeat("Begin", encode(further))
        data = encode(frame)
        self._put(data, droppable=droppable, flush=flush)
        return data


def _norms(record: StepRecord) -> NDArray[np.float32]:
    """Return the norm of each gradient.

    :data:`MISSING` without a gradient and at a step that a ``GradScaler`` skipped.
    """
    # A finite gradient whose norm is beyond float32 must not look infinite.
    norms = np.where(
        record.grad_finite, np.minimum(record.grad_norms, FLOAT32_MAX), record.grad_norms
    )
    present = record.grad_present & (not record.skipped)
    return _as_float32(np.where(present, norms, MISSING))


def _table(record: StepRecord, statistics: tuple[Statistic, ...]) -> NDArray[np.float32]:
    """Return the statistics of all layers, ``[statistics, modules]``."""
    layers = table(record)
    places = [PLACES[statistic.name] for statistic in statistics]
    values = np.where(layers.known, layers.values, MISSING)[:, places].T
    return _as_float32(values)


def _as_float32(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return values rounded to float32; finite numbers beyond it become its largest."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    infinite = np.isinf(narrow)
    if infinite.any():
        narrow[infinite & np.isfinite(values)] = FLOAT32_MAX
    return narrow


def _failure(exception: BaseException) -> Failure:
    """Return an exception as text; the object would keep the training loop's frames alive."""
    lines = traceback.format_exception(type(exception), exception, exception.__traceback__)
    return Failure(
        type=type(exception).__qualname__,
        message=str(exception)[:MAX_TEXT],
        traceback="".join(lines)[-MAX_TEXT:],
    )

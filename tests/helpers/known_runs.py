"""Runs with known numbers, written as the logger writes them: the one writer of raw formats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from telemetry import Alert, Layout, Module, Parameter, Sketch
from telemetry.alert import Consequence
from telemetry.events import summaries
from telemetry.events.files import EventFile, run_log_file, session_start
from telemetry.events.message_pack import encode
from telemetry.events.run_log import (
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
)
from telemetry.layers import MATRIX_STATISTICS
from telemetry.layers.record import Group
from telemetry.layers.units import encode_units
from telemetry.records.rows import Rows
from tests.helpers import serialized

COLUMN = {statistic.name: index for index, statistic in enumerate(MATRIX_STATISTICS)}
MISSING = -1.0
"""A number that was not measured, among norms and statistics."""

ValuesOf = Callable[[int], NDArray[np.float32]]


class EventWriter:
    """Event file of ours in a directory; each event is in it when the call returns."""

    def __init__(self, log_dir: Path | str) -> None:
        self._file = EventFile(str(log_dir))
        self._file.append(deque())

    def write_values(
        self, values: Sequence[bytes], step: int = 0, wall_time: float | None = None
    ) -> None:
        """Write one event; its time is now, if none is given."""
        self.write(
            summaries.event_of(values, step, time.time() if wall_time is None else wall_time)
        )

    def purge(self, step: int) -> None:
        """Make readers drop this step and later ones of earlier files."""
        self.write(session_start(step))

    def write(self, event: bytes) -> None:
        self._file.append(deque([event]))

    def close(self) -> None:
        self._file.close()


def layout_of(names: Sequence[str], type_name: str = "Linear") -> Layout:
    """Modules with a 2×3 weight each."""
    return Layout(
        modules=tuple(Module(name=name, type_name=type_name) for name in names),
        parameters=tuple(
            Parameter(name=f"{name}.weight", module_name=name, shape=(2, 3)) for name in names
        ),
    )


LAYOUT = layout_of(["a", "b.x", "b.y"])


def norms(step: int) -> NDArray[np.float32]:
    """Return gradient norms of :data:`LAYOUT` that tell the step and the layer."""
    return np.array([step, step * 10, step * 100], np.float32)


def matrices(step: int) -> NDArray[np.float32]:
    """Return statistics of :data:`LAYOUT`, which are all the number of the step."""
    return np.full((3, len(COLUMN)), step, np.float32)


def write_run(
    log_dir: Path,
    layout: Layout,
    *,
    steps: Sequence[int],
    norms: ValuesOf | None = None,
    matrices: ValuesOf | None = None,
    units: Callable[[int], NDArray[np.float32] | bytes | None] | None = None,
    units_of: int = 0,
    every: int = 1,
    alerts: Sequence[Alert] = (),
    run: str = "20260101-000000-aaaa",
    losses: bool = True,
    logged: Mapping[str, Mapping[int, float]] | None = None,
    loss_tag: str | None = None,
    hparams: Mapping[str, str | float | bool] | None = None,
    end: bool | Exception = False,
    time_of: Callable[[int], float] = lambda step: time.time(),
) -> None:
    """Files of one logger, of a model with one layout.

    Args:
        log_dir: Of the run.
        layout: Of the model.
        steps: All steps, in their order in the file; earlier files of the same run hold nothing
            from the first of them on.
        norms: Gradient norms of a step, ``[parameters]``; None: ones.
        matrices: Statistics of a step, ``[modules, statistics]``; see :data:`COLUMN`.
        units: Extremes of a module's units at a step, ``[units, 2]``, or damaged ones; None: it
            has none there.
        units_of: Index of that module.
        every: Matrices and units are written at multiples of it.
        alerts: In the order in which they are written.
        run: Id of the run.
        losses: Whether to write a loss and a learning rate.
        logged: Further scalars, by tag and step.
        loss_tag: Of the scalar that the logger chose as the loss.
        hparams: Hyperparameters.
        end: Whether the logger was closed, or what ended the training.
        time_of: Seconds since the epoch at which a step is written.
    """
    file, first = run_log_file(str(log_dir)), steps[0]
    norms = norms or (lambda step: np.ones(len(layout.parameters), np.float32))

    def write(*frames: Frame) -> None:
        file.append(deque(map(encode, frames)))

    write(
        Begin(first, time_of(first), run, 0),
        LaidOut(first, time_of(first), layout, [*COLUMN]),
    )
    if loss_tag is not None:
        write(LossFound(first, time_of(first), loss_tag, 0))
    if hparams is not None:
        write(Hyperparameters(first, time_of(first), dict(hparams)))
    with closing(EventWriter(log_dir)) as writer:
        for step in steps:
            time_s, some = time_of(step), norms(step)
            loss = 2.0 / (1 + step) if losses else None
            total = float(np.sqrt(np.square(np.maximum(some, 0), dtype=np.float64).sum()))
            write(Norms(step, time_s, _bytes(some), total, (0.1,) * losses, loss, None, False))
            if step % every == 0 and (matrices is not None or units is not None):
                missing = np.full((len(layout.modules), len(COLUMN)), MISSING, np.float32)
                table = missing if matrices is None else matrices(step)
                found = b""
                if units is not None and (extremes := units(step)) is not None:
                    found = (
                        extremes if isinstance(extremes, bytes) else _encoded(extremes, units_of)
                    )
                write(FullStep(step, time_s, _bytes(table.T), memoryview(found)))
            values = {} if loss is None else {"loss": loss, "learning_rate/0": 0.1}
            values |= {tag: of[step] for tag, of in (logged or {}).items() if step in of}
            if values:
                write(Logged(step, time_s, values))
                writer.write_values([summaries.scalars(values.items())], step, time_s)
    for alert in alerts:
        write(Alerted(alert.step, time_of(alert.step), alert))
    if end:
        failure = Failure(type(end).__name__, "", "") if isinstance(end, Exception) else None
        write(End(steps[-1], time_of(steps[-1]), failure))
    file.close()


def write_newer(log_dir: Path, version: int) -> None:
    """A run log of a later version."""
    file = run_log_file(str(log_dir))
    file.append(deque([encode(Begin(0, 0.0, "run", None, format=version))]))
    file.close()


def _encoded(extremes: NDArray[np.float32], module: int) -> bytes:
    rows = Rows.of([Sketch.empty()], units=[extremes])
    return encode_units(Group(rows=rows, modules=np.array([module]), size=module + 1))


def _bytes(values: NDArray[np.float32]) -> memoryview:
    return memoryview(values.astype("<f4").tobytes())


def write_dashboards(
    log_dir: Path,
    *,
    scalars: Mapping[str, Mapping[int, float]] | None = None,
    histograms: Mapping[str, Mapping[int, tuple[ArrayLike, ArrayLike, ArrayLike]]] | None = None,
    pictures: Mapping[str, Mapping[int, bytes]] | None = None,
    restart_at: int | None = None,
) -> None:
    """A file with data of TensorBoard's own dashboards alone.

    Args:
        log_dir: Of the run; without a call of :func:`write_run` it has no data of ours.
        scalars: By tag and step.
        histograms: Left edges, right edges and counts, by tag and step.
        pictures: PNG files of 2 × 2 pixels, by tag and step.
        restart_at: The step from which it replaces what earlier files hold.
    """
    with closing(EventWriter(log_dir)) as writer:
        if restart_at is not None:
            writer.purge(restart_at)
        for tag, points in (scalars or {}).items():
            for step, value in points.items():
                writer.write_values([summaries.scalar(tag, value)], step)
        for tag, tables in (histograms or {}).items():
            for step, buckets in tables.items():
                writer.write_values([serialized.histogram(tag, *buckets)], step)
        for tag, images in (pictures or {}).items():
            for step, png in images.items():
                writer.write_values([summaries.image(tag, [png], 2, 2)], step)


def consequence(kind: str, module_name: str) -> Consequence:
    """A fault that an alert caused."""
    return Consequence(kind=kind, module_name=module_name)


def alert_at(
    step: int,
    module_name: str | None,
    *,
    follows: Sequence[tuple[str, str | None]] = (),
    **changes: object,
) -> Alert:
    """A fault at a place; ``follows`` has kind and layer of each consequence."""
    values = {
        "kind": "exploding_gradient",
        "severity": "error",
        "value": 1e9,
        "threshold": 10.0,
        "summary": "The gradient grew.",
        "consequences": tuple(Consequence(kind=kind, module_name=name) for kind, name in follows),
    }
    return Alert(step=step, module_name=module_name, **{**values, **changes})  # type: ignore[arg-type]

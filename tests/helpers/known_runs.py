"""Runs with known numbers, written as the logger writes them: the one writer of raw formats."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from telemetry import Alert, Layout, Module, Parameter, Sketch
from telemetry.alert import Consequence
from telemetry.events import summaries
from telemetry.events.page_format import (
    EVENTS_PER_TAG,
    PLUGIN_NAME,
    Chunk,
    ChunkKind,
    alert_tag,
    encode_alert,
    encode_end,
    encode_layout,
    end_tag,
    layout_tag,
)
from telemetry.events.page_format import loss_tag as tag_of_loss
from telemetry.layers import MATRIX_STATISTICS
from telemetry.layers.record import Group
from telemetry.layers.units import encode_units
from telemetry.records.rows import Rows
from telemetry.writing import hparams as hparams_format
from tests.helpers import serialized
from tests.helpers.event_writer import EventWriter

COLUMN = {statistic.name: index for index, statistic in enumerate(MATRIX_STATISTICS)}
MISSING = -1.0
"""A number that was not measured, among norms and statistics."""

ValuesOf = Callable[[int], NDArray[np.float32]]


def layout_of(names: Sequence[str], type_name: str = "Linear") -> Layout:
    """Modules with a 2×3 weight each."""
    return Layout(
        modules=tuple(Module(name=name, type_name=type_name) for name in names),
        parameters=tuple(
            Parameter(name=f"{name}.weight", module_name=name, shape=(2, 3)) for name in names
        ),
    )


def write_run(
    log_dir: Path,
    layout: Layout,
    *,
    steps: Sequence[int],
    norms: ValuesOf,
    matrices: ValuesOf | None = None,
    units: Callable[[int], NDArray[np.float32] | None] | None = None,
    units_of: int = 0,
    every: int = 1,
    alerts: Sequence[Alert] = (),
    session: str = "20260101-000000.000-aaaa",
    losses: bool = True,
    loss_tag: str | None = None,
    end: bool | Exception = False,
    time_of: Callable[[int], float] = lambda step: time.time(),
) -> None:
    """One session of one layout.

    Args:
        log_dir: Of the run.
        layout: Of the model.
        steps: All steps, in their order in the file.
        norms: Gradient norms of a step, ``[parameters]``.
        matrices: Statistics of a step, ``[modules, statistics]``; see :data:`COLUMN`.
        units: Extremes of a module's units at a step, ``[units, 2]``; None: it has none there.
        units_of: Index of that module.
        every: Matrices and units are written at multiples of it.
        alerts: In the order in which they are numbered.
        session: Sorts the sessions of a run, and begins with its time.
        losses: Whether to write a loss and a learning rate.
        loss_tag: Of the scalar that the logger chose as the loss.
        end: Whether the logger was closed, or what ended the training.
        time_of: Seconds since the epoch at which a step is written.
    """
    full_count = 0

    def numbers(kind: ChunkKind, index: int, content: NDArray[np.float32] | bytes) -> bytes:
        chunk = Chunk(kind=kind, session=session, layout=0, number=index // EVENTS_PER_TAG)
        return page(chunk.tag, content)

    with closing(EventWriter(log_dir)) as writer:
        content = page(layout_tag(session, 0), encode_layout(layout, MATRIX_STATISTICS))
        choice = [] if loss_tag is None else [page(tag_of_loss(session, loss_tag), b"")]
        writer.write_values([content, *choice], steps[0], time_of(steps[0]))
        for index, step in enumerate(steps):
            row = np.concatenate([np.zeros(1, np.float32), norms(step)])[None]
            values = [numbers("n", index, row)]
            if step % every == 0:
                if matrices is not None:
                    values.append(numbers("m", full_count, matrices(step)))
                if units is not None and (extremes := units(step)) is not None:
                    rows = Rows.of([Sketch.empty()], units=[extremes])
                    group = Group(rows=rows, modules=np.array([units_of]), size=units_of + 1)
                    values.append(numbers("u", full_count, encode_units(group)))
                full_count += 1
            if losses:
                values.append(summaries.scalar("loss", 2.0 / (1 + step)))
                values.append(summaries.scalar("learning_rate/0", 0.1))
            writer.write_values(values, step, time_of(step))
        for number, alert in enumerate(alerts):
            value = page(alert_tag(session, number), encode_alert(alert))
            writer.write_values([value], alert.step, time_of(alert.step))
        if end:
            content = encode_end(end if isinstance(end, Exception) else None)
            writer.write_values([page(end_tag(session), content)], steps[-1], time_of(steps[-1]))


def page(tag: str, content: NDArray[np.float32] | bytes) -> bytes:
    """A value for the page."""
    return summaries.tensor(tag, content, PLUGIN_NAME)


def write_dashboards(
    log_dir: Path,
    *,
    scalars: Mapping[str, Mapping[int, float]] | None = None,
    histograms: Mapping[str, Mapping[int, tuple[ArrayLike, ArrayLike, ArrayLike]]] | None = None,
    pictures: Mapping[str, Mapping[int, bytes]] | None = None,
    hparams: Mapping[str, str | float | bool] | None = None,
    restart_at: int | None = None,
) -> None:
    """A file with data of TensorBoard's own dashboards alone.

    Args:
        log_dir: Of the run; without a call of :func:`write_run` it has no data of ours.
        scalars: By tag and step.
        histograms: Left edges, right edges and counts, by tag and step.
        pictures: PNG files of 2 × 2 pixels, by tag and step.
        hparams: Of the run.
        restart_at: The step from which it replaces what earlier files hold.
    """
    with closing(EventWriter(log_dir)) as writer:
        if restart_at is not None:
            writer.purge(restart_at)
        if hparams is not None:
            writer.write_values(hparams_format.values_of(hparams, ["loss"]), 0)
        for tag, points in (scalars or {}).items():
            for step, value in points.items():
                writer.write_values([summaries.scalar(tag, value)], step)
        for tag, tables in (histograms or {}).items():
            for step, buckets in tables.items():
                writer.write_values([serialized.histogram(tag, *buckets)], step)
        for tag, images in (pictures or {}).items():
            for step, png in images.items():
                writer.write_values([summaries.image(tag, [png], 2, 2)], step)


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

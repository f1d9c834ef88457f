"""Runs with known numbers, written as the logger writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert
from telemetry.events import FileWriter, summaries
from telemetry.events.page_format import (
    EVENTS_PER_TAG,
    PLUGIN_NAME,
    Chunk,
    alert_tag,
    encode_alert,
    encode_layout,
    layout_tag,
)
from telemetry.layers import MATRIX_STATISTICS
from telemetry.layers.record import Group
from telemetry.layers.units import encode_units
from telemetry.reading.run_data import RunData
from telemetry.records import Layout, Module, Parameter
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch

COLUMN = {statistic.name: index for index, statistic in enumerate(MATRIX_STATISTICS)}
ValuesOf = Callable[[int], NDArray[np.float32]]
OpenRun = Callable[[Path], RunData]


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
    units: ValuesOf | None = None,
    every: int = 1,
    alerts: Sequence[Alert] = (),
    session: str = "20260101-000000.000-aaaa",
    losses: bool = True,
) -> None:
    """One session of one layout.

    Args:
        log_dir: Of the run.
        layout: Of the model.
        steps: All steps, ascending.
        norms: Gradient norms of a step, ``[parameters]``.
        matrices: Statistics of a step, ``[modules, statistics]``.
        units: Extremes of the first module's units at these steps, ``[units, 2]``.
        every: Matrices are written at multiples of it.
        alerts: In the order in which they are numbered.
        session: Sorts the sessions of a run.
        losses: Whether to write a loss and a learning rate.
    """
    writer = FileWriter(log_dir, max_pending_bytes=1 << 40)
    content = encode_layout(layout, MATRIX_STATISTICS)
    tag = layout_tag(session, 0)
    writer.write_values([summaries.tensor(tag, content, PLUGIN_NAME)], steps[0])
    full_count = 0
    for index, step in enumerate(steps):
        row = np.concatenate([np.zeros(1, np.float32), norms(step)])[None]
        number = index // EVENTS_PER_TAG
        tag = Chunk(kind="n", session=session, layout=0, number=number).tag
        values = [summaries.tensor(tag, row, PLUGIN_NAME)]
        if matrices is not None and step % every == 0:
            number = full_count // EVENTS_PER_TAG
            tag = Chunk(kind="m", session=session, layout=0, number=number).tag
            values.append(summaries.tensor(tag, matrices(step), PLUGIN_NAME))
            if units is not None:
                rows = Rows.of([Sketch.empty()], units=[units(step)])
                data = encode_units(Group(rows=rows, modules=np.array([0]), size=1))
                tag = Chunk(kind="u", session=session, layout=0, number=number).tag
                values.append(summaries.tensor(tag, data, PLUGIN_NAME))
            full_count += 1
        if losses:
            values.append(summaries.scalar("loss", 2.0 / (1 + step)))
            values.append(summaries.scalar("learning_rate/0", 0.1))
        writer.write_values(values, step)
    for number, alert in enumerate(alerts):
        value = summaries.tensor(alert_tag(session, number), encode_alert(alert), PLUGIN_NAME)
        writer.write_values([value], alert.step)
    writer.close()


def alert_at(step: int, module_name: str | None, **changes: object) -> Alert:
    """A fault at a place."""
    values = {
        "kind": "exploding_gradient",
        "severity": "error",
        "value": 1e9,
        "threshold": 10.0,
        "summary": "The gradient grew.",
    }
    return Alert(step=step, module_name=module_name, **{**values, **changes})  # type: ignore[arg-type]

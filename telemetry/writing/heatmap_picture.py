"""Picture of layers × steps for TensorBoard's Images tab, without the Telemetry page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.heat_map import heat_map
from telemetry.plain_text import printable
from telemetry.records import Layout, StepRecord
from telemetry.tag_names import IMAGES
from telemetry.writing.size_budget import SizeBudget

TAG = f"{IMAGES}telemetry_heatmap"
_MAX_COLUMNS = 512
_MAX_ROWS = 512
_FIRST = 8  # full steps
_GROWTH = 1.25
_PAUSE_S = 10.0


class HeatmapPicture:
    """Collects the gradient norms of full steps and draws them from time to time.

    It draws after 25 % more steps and at least ten seconds, and once more at the end. TensorBoard
    always keeps the last picture.
    """

    def __init__(self, size_budget: SizeBudget | None = None) -> None:
        self._size_budget = size_budget or SizeBudget()
        self._layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: list[int] = []
        self._columns: list[NDArray[np.float64]] = []
        self._stride = 1  # full steps per column
        self._taken = 0
        self._next_picture = float(_FIRST)
        self._drawn, self._drawn_at_s = 0, 0.0  # full steps in the last picture, and its time

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """Add a record; yield a picture if one is due."""
        if not record.full or record.phase or record.skipped:
            return
        if record.layout is not self._layout:
            self._begin()
            self._layout = record.layout
        self._add(record)
        if self._taken >= self._next_picture and record.wall_time > self._drawn_at_s + _PAUSE_S:
            self._next_picture, self._drawn_at_s = self._taken * _GROWTH, record.wall_time
            yield self._picture()

    def last_values(self) -> Iterator[bytes]:
        """Yield a picture of all steps, unless the last one shows them or they are few."""
        if self._taken > self._drawn and self._taken >= _FIRST:
            yield self._picture()

    def _add(self, record: StepRecord) -> None:
        norms = np.where(record.grad_present, record.grad_norms, -1.0)[record.layout.depth_order]
        if self._taken % self._stride:
            self._columns[-1] = np.maximum(self._columns[-1], norms)
        else:
            self._columns.append(norms)
            self._steps.append(record.step)
        self._taken += 1
        if len(self._columns) == _MAX_COLUMNS and self._taken % self._stride == 0:
            pairs = zip(self._columns[::2], self._columns[1::2], strict=True)
            self._columns = [np.maximum(a, b) for a, b in pairs]
            self._steps = self._steps[::2]
            self._stride *= 2

    def _picture(self) -> bytes:
        assert self._layout is not None
        self._drawn = self._taken
        matrix = np.stack(self._columns, axis=1)
        starts = np.arange(0, len(matrix), -(-len(matrix) // _MAX_ROWS))
        names = [
            printable(self._layout.parameters[i].name) for i in self._layout.depth_order[starts]
        ]
        drawn = heat_map(
            np.maximum.reduceat(matrix, starts), names, self._steps, title="gradient norm"
        )
        return self._size_budget.picture(TAG, drawn.pixels())

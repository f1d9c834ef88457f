"""The layers × steps picture for TensorBoard's Images tab, without the Telemetry page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from telemetry import palette
from telemetry.records import Layout, StepRecord
from telemetry.writing.bulk import Bulk

TAG = "telemetry_heatmap"
_MAX_COLUMNS = 512
_MAX_ROWS = 512
_MIN_WIDTH, _MIN_HEIGHT = 512, 256
_MARGIN, _TEXT_HEIGHT = 200, 14
_GROWTH = 1.25
_MISSING_RGB = (228, 230, 234)


class HeatmapPicture:
    """Collects the gradient norms of full steps and draws them from time to time.

    It draws whenever the number of steps has grown by a quarter, so drawing costs little however
    long the run is. TensorBoard always keeps the last picture.

    Args:
        bulk: Writes them.
    """

    def __init__(self, bulk: Bulk | None = None) -> None:
        self._bulk = bulk or Bulk()
        self._layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: list[int] = []
        self._columns: list[NDArray[np.float64]] = []
        self._stride = 1  # full steps per column
        self._taken = 0
        self._next_picture = 8.0

    def values_of(self, record: StepRecord) -> Iterator[bytes]:
        """Adds a record; yields a picture if one is due."""
        if not record.full or record.phase or record.skipped:
            return
        if record.layout is not self._layout:
            self._begin()
            self._layout = record.layout
        self._add(record)
        if self._taken >= self._next_picture:
            self._next_picture = self._taken * _GROWTH
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
        matrix = np.stack(self._columns, axis=1)
        starts = np.arange(0, len(matrix), -(-len(matrix) // _MAX_ROWS))
        names = [self._layout.parameters[i].name for i in self._layout.depth_order[starts]]
        return self._bulk.picture(
            TAG, draw(np.maximum.reduceat(matrix, starts), names, self._steps)
        )


def draw(matrix: NDArray[np.float64], names: list[str], steps: list[int]) -> NDArray[np.uint8]:
    """Draws the matrix with names at the side, and steps and the color scale below.

    Args:
        matrix: ``[rows, columns]``, at least 0; -1 where nothing was measured.
        names: One for each row.
        steps: One for each column.

    Returns:
        Pixels ``[height, width, 3]``.
    """
    from PIL import Image, ImageDraw

    low, high = _range(matrix)
    cells = Image.fromarray(_colors(matrix, low, high))
    rows, columns = matrix.shape
    size = (columns * -(-_MIN_WIDTH // columns), rows * -(-_MIN_HEIGHT // rows))
    picture = Image.new(
        "RGB", (_MARGIN + size[0] + 10, size[1] + 4 * _TEXT_HEIGHT), (255, 255, 255)
    )
    picture.paste(cells.resize(size, Image.Resampling.NEAREST), (_MARGIN, 4))
    pen = ImageDraw.Draw(picture)
    for row in range(0, rows, -(-_TEXT_HEIGHT * rows // size[1])):
        at = (_MARGIN - 6, 4 + (row + 0.5) * size[1] / rows)
        pen.text(at, names[row][-32:], fill=(60, 60, 60), anchor="rm")
    below = size[1] + 8
    pen.text((_MARGIN, below), f"step {steps[0]}", fill=(60, 60, 60))
    pen.text((_MARGIN + size[0], below), str(steps[-1]), fill=(60, 60, 60), anchor="ra")
    bar = _colors(np.geomspace(low, high, 256)[None], low, high)
    below += _TEXT_HEIGHT + 6
    picture.paste(Image.fromarray(bar).resize((256, 10)), (_MARGIN + 60, below))
    pen.text((_MARGIN + 54, below), f"{low:.0e}", fill=(60, 60, 60), anchor="ra")
    pen.text((_MARGIN + 322, below), f"{high:.0e}  gradient norm", fill=(60, 60, 60))
    return np.asarray(picture)


def _range(matrix: NDArray[np.float64]) -> tuple[float, float]:
    positive = matrix[np.isfinite(matrix) & (matrix > 0)]
    if not positive.size:
        return 0.1, 1.0
    low, high = np.log10(np.quantile(positive, [0.002, 0.998]))
    return float(10.0 ** np.floor(low)), float(10.0 ** max(np.ceil(high), np.floor(low) + 1))


def _colors(matrix: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Pixels ``[rows, columns, 3]``."""
    stops = np.array(palette.rgb(palette.VIRIDIS))
    with np.errstate(divide="ignore", invalid="ignore"):
        place = (np.log(np.abs(matrix)) - np.log(low)) / (np.log(high) - np.log(low))
    place = np.nan_to_num(place).clip(0, 1) * (len(stops) - 1)
    channels = [np.interp(place, np.arange(len(stops)), stops[:, k]) for k in range(3)]
    pixels = np.stack(channels, axis=-1).round().astype(np.uint8)
    pixels[matrix == 0] = palette.rgb(palette.ZERO_COLOR)[0]
    pixels[matrix < 0] = _MISSING_RGB
    pixels[np.isposinf(matrix)] = palette.rgb(palette.INFINITE_COLORS[0])[0]
    pixels[np.isnan(matrix)] = palette.rgb(palette.NAN_COLORS[0])[0]
    return pixels

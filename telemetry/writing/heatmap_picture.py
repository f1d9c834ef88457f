"""The layers × steps picture as a PNG, for those who look without the Telemetry page."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry.events import summaries
from telemetry.records import Layout, StepRecord

TAG = "telemetry_heatmap"
_MAX_COLUMNS = 512
_MAX_ROWS = 512
_MIN_WIDTH, _MIN_HEIGHT = 512, 256
_MARGIN, _TEXT_HEIGHT = 200, 14
_GROWTH = 1.25
_NAN_RGB, _INFINITE_RGB, _MISSING_RGB = (213, 0, 109), (255, 90, 0), (228, 230, 234)
# viridis (matplotlib, CC0), nine of its colors
_VIRIDIS = "440154472d7b3b528b2c728e21918c28ae805ec962addc30fde725"


class HeatmapPicture:
    """Collects the gradient norms of full steps, and draws them now and then.

    A picture comes whenever there are a quarter more steps than in the one before, so that drawing
    costs little however long the run is; TensorBoard keeps the last one in any case.
    """

    def __init__(self) -> None:
        self._layout: Layout | None = None
        self._begin()

    def _begin(self) -> None:
        self._steps: list[int] = []
        self._columns: list[NDArray[np.float64]] = []
        self._stride = 1  # full steps behind a column
        self._taken = 0
        self._next_picture = 8.0

    def values_of(self, record: StepRecord) -> Iterator[Summary.Value]:
        """Takes a record in; gives out a picture if it is time for one."""
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

    def _picture(self) -> Summary.Value:
        assert self._layout is not None
        matrix = np.stack(self._columns, axis=1)
        starts = np.arange(0, len(matrix), -(-len(matrix) // _MAX_ROWS))
        names = [self._layout.parameters[i].name for i in self._layout.depth_order[starts]]
        png, width, height = draw(np.maximum.reduceat(matrix, starts), names, self._steps)
        return summaries.image(TAG, [png], width, height)


def draw(matrix: NDArray[np.float64], names: list[str], steps: list[int]) -> tuple[bytes, int, int]:
    """A PNG with names at the side, steps and the scale below, and its width and height.

    Args:
        matrix: ``[rows, columns]``, above 0; -1 where there is nothing.
        names: Of the rows.
        steps: Of the columns.
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
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=False)
    return file.getvalue(), picture.width, picture.height


def _range(matrix: NDArray[np.float64]) -> tuple[float, float]:
    positive = matrix[np.isfinite(matrix) & (matrix > 0)]
    if not positive.size:
        return 0.1, 1.0
    low, high = np.log10(np.quantile(positive, [0.002, 0.998]))
    return float(10.0 ** np.floor(low)), float(10.0 ** max(np.ceil(high), np.floor(low) + 1))


def _colors(matrix: NDArray[np.float64], low: float, high: float) -> NDArray[np.uint8]:
    """Pixels ``[rows, columns, 3]``."""
    stops = np.array(
        [[int(_VIRIDIS[i + k : i + k + 2], 16) for k in (0, 2, 4)] for i in range(0, 54, 6)]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        place = (np.log(np.abs(matrix)) - np.log(low)) / (np.log(high) - np.log(low))
    place = np.nan_to_num(place).clip(0, 1) * (len(stops) - 1)
    channels = [np.interp(place, np.arange(len(stops)), stops[:, k]) for k in range(3)]
    pixels = np.stack(channels, axis=-1).round().astype(np.uint8)
    pixels[matrix == 0] = 0
    pixels[matrix < 0] = _MISSING_RGB
    pixels[np.isposinf(matrix)] = _INFINITE_RGB
    pixels[np.isnan(matrix)] = _NAN_RGB
    return pixels

"""Draw a heat map of layers × steps as pixels or SVG, in the colors of the page."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

# viridis (matplotlib, CC0), every eighth color.
# Finite values, from the smallest to the largest: ``rrggbb`` of 33 colors.
VIRIDIS = (
    "440154470d6048186a482475472e7c4538824241863e4c8a3a548c365d8d32658e2e6d8e2b758e287d8e25848e"
    "228c8d1f948c1e9c8920a38625ab822eb37c3aba7648c16e58c76569cd5b7fd34e93d741a8db34bddf26d5e21a"
    "eae51afde725"
)

# The page draws stripes of two colors; heat maps use the first.
NAN_COLORS = ("#d5006d", "#ff7ac0")
INFINITE_COLORS = ("#ff5a00", "#7a1f00")

ZERO_COLOR = "#000000"


def _rgb(text: str) -> list[tuple[int, ...]]:
    """Parse the colors in ``rrggbb...``, with or without a leading ``#``."""
    digits = bytes.fromhex(text.removeprefix("#"))
    return [tuple(digits[start : start + 3]) for start in range(0, len(digits), 3)]


_NAME_LENGTH = 20
_MISSING_RGB = (228, 230, 234)
_TEXT_COLOR = "#3c3c3c"
_ANCHORS = {"l": "start", "r": "end"}


class Text(NamedTuple):
    """Text anchored at a point by its left or right end; ``side`` is ``l`` or ``r``."""

    x: float
    y: float
    words: str
    side: str


class Cells(NamedTuple):
    """Colors ``[rows, columns, 3]``, enlarged to ``width × height`` pixels."""

    x: int
    y: int
    width: int
    height: int
    colors: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True, eq=False)
class HeatMap:
    """Layout of a heat map; all sizes are in pixels."""

    width: int
    height: int
    text_height: int  # of all texts, which are vertically centered at their points
    cells: Sequence[Cells]  # matrix and color scale
    texts: Sequence[Text]

    def pixels(self) -> NDArray[np.uint8]:
        """Return pixels, shape ``[height, width, 3]``."""
        from PIL import Image, ImageDraw, ImageFont

        picture = Image.new("RGB", (self.width, self.height), (255, 255, 255))
        for x, y, width, height, colors in self.cells:
            enlarged = Image.fromarray(colors).resize((width, height), Image.Resampling.NEAREST)
            picture.paste(enlarged, (x, y))
        pen, font = ImageDraw.Draw(picture), ImageFont.load_default(self.text_height)
        for text in self.texts:
            pen.text((text.x, text.y), text.words, _TEXT_COLOR, font, f"{text.side}m")
        return np.asarray(picture)

    def svg(self) -> str:
        """Return an SVG document with editable texts; the cells are embedded pictures."""
        from PIL import Image

        parts = []
        for x, y, width, height, colors in self.cells:
            file = io.BytesIO()
            Image.fromarray(colors).save(file, "PNG")
            data = base64.b64encode(file.getvalue()).decode()
            parts.append(
                f'<image x="{x}" y="{y}" width="{width}" height="{height}" '
                'preserveAspectRatio="none" style="image-rendering: pixelated" '
                f'href="data:image/png;base64,{data}"/>'
            )
        for text in self.texts:
            place = f'x="{text.x:g}" y="{text.y:g}" text-anchor="{_ANCHORS[text.side]}"'
            parts.append(f"<text {place}>{escape(text.words)}</text>")
        style = f'font-family="sans-serif" font-size="{self.text_height}" fill="{_TEXT_COLOR}"'
        size = f'width="{self.width}" height="{self.height}"'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            '<rect width="100%" height="100%" fill="white"/>',
            f'<g {style} dominant-baseline="central">',
        )
        return "\n".join([*head, *parts, "</g>", "</svg>", ""])


def heat_map(
    matrix: NDArray[np.floating],
    names: Sequence[str],
    steps: Sequence[int],
    *,
    title: str,
    log: bool = True,
    least_width: int = 512,
    text_height: int | None = None,
) -> HeatMap:
    """Lay out the matrix with names at the side, and steps and the color scale below.

    Args:
        matrix: ``[rows, columns]``, at least 0; -1 is missing. Names are of rows, steps of columns.
        log: Whether the scale is logarithmic; else the numbers are shares.
        least_width: Minimum width of all cells, in pixels.
        text_height: In pixels; default: readable where TensorBoard shows the picture 350 pixels
            wide.
    """
    low, high = _range(matrix, log)
    scale = (np.geomspace if log else np.linspace)(low, high, 256)
    rows, columns = matrix.shape
    width = columns * -(-least_width // columns)
    height = rows * -(-least_width * 2 // 3 // rows)
    text = text_height or width // 22
    left, top = 10 * text, text // 2
    bar = left + width // 2, top + height + text * 2, width // 3, text // 2
    shared = os.path.commonprefix(names).rfind(".") + 1  # noqa: RUF071 - characters are meant
    beside = [
        Text(left - text // 3, top + (row + 0.5) * height / rows, _short(names[row][shared:]), "r")
        for row in range(0, rows, -(-text * rows // height))
    ]
    of_steps, of_scale = top + height + text * 3 // 4, top + height + text * 9 // 4
    form = ".0e" if log else ".0%"
    return HeatMap(
        width=left + width + text,
        height=top + height + 3 * text,
        text_height=text,
        cells=[
            Cells(left, top, width, height, colors_of(matrix, low, high, log)),
            Cells(*bar, colors_of(scale[None], low, high, log)),
        ],
        texts=[
            *beside,
            Text(left, of_steps, f"step {steps[0]}", "l"),
            Text(left + width, of_steps, str(steps[-1]), "r"),
            Text(bar[0] - text // 3, of_scale, f"{title}  {low:{form}}", "r"),
            Text(bar[0] + bar[2] + text // 3, of_scale, f"{high:{form}}", "l"),
        ],
    )


def _short(name: str) -> str:
    """Shorten a name: keep its beginning and most of its end."""
    return name if len(name) <= _NAME_LENGTH else f"{name[:6]}…{name[7 - _NAME_LENGTH :]}"


def _range(matrix: NDArray[np.floating], log: bool) -> tuple[float, float]:
    positive = matrix[np.isfinite(matrix) & (matrix > 0)]
    if not log:
        return 0.0, float(positive.max(initial=0.01))
    if not positive.size:
        return 0.1, 1.0
    low, high = np.log10(np.quantile(positive, [0.002, 0.998]))
    return float(10.0 ** np.floor(low)), float(10.0 ** max(np.ceil(high), np.floor(low) + 1))


def colors_of(
    matrix: NDArray[np.floating], low: float, high: float, log: bool
) -> NDArray[np.uint8]:
    """Return the colors of a matrix, ``[rows, columns, 3]``."""
    stops = np.array(_rgb(VIRIDIS))
    with np.errstate(divide="ignore", invalid="ignore"):
        if log:
            place = (np.log(np.abs(matrix)) - np.log(low)) / (np.log(high) - np.log(low))
        else:
            place = (matrix - low) / (high - low)
    place = np.nan_to_num(place).clip(0, 1) * (len(stops) - 1)
    channels = [np.interp(place, np.arange(len(stops)), stops[:, k]) for k in range(3)]
    colors = np.stack(channels, axis=-1).round().astype(np.uint8)
    if log:
        colors[matrix == 0] = _rgb(ZERO_COLOR)[0]
    colors[matrix < 0] = _MISSING_RGB
    colors[np.isposinf(matrix)] = _rgb(INFINITE_COLORS[0])[0]
    colors[np.isnan(matrix)] = _rgb(NAN_COLORS[0])[0]
    return colors

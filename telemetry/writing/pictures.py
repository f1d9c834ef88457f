"""Pictures of full steps for TensorBoard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from telemetry.events import summaries
from telemetry.measure.images import encode_png

PIXELS_PER_STEP = 1 << 17

Picture = tuple[str, NDArray[np.uint8]]
"""Tag, and pixels ``[height, width, 3]``."""


class Pictures:
    """Pictures of a full step: as many as have 131,072 pixels together.

    The next full step goes on with the others. A picture that is larger alone is drawn at half its
    size, or less.
    """

    def __init__(self) -> None:
        self._next: Counter[str] = Counter()  # by phase

    def values_of(self, pictures: Sequence[Picture], phase: str = "") -> Iterator[bytes]:
        """Yield the pictures of one step, or of a phase."""
        left = PIXELS_PER_STEP
        for _ in pictures:
            tag, pixels = pictures[self._next[phase] % len(pictures)]
            while pixels[..., 0].size > PIXELS_PER_STEP:
                pixels = pixels[::2, ::2]
            left -= pixels[..., 0].size
            if left < 0:
                return
            self._next[phase] = (self._next[phase] + 1) % len(pictures)
            yield self.value(tag, pixels)

    def value(self, tag: str, pixels: NDArray[np.uint8]) -> bytes:
        """Return one picture."""
        height, width, _ = pixels.shape
        return summaries.image(tag, [encode_png(pixels)], width, height)

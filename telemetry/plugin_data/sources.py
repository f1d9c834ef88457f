"""Where the data of one run is read from, whether TensorBoard's server or the files themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, eq=False)
class Point:
    """One value of a tag.

    Attributes:
        step: Of the event.
        wall_time: Of the event, seconds since the epoch.
        value: An array; ``bytes`` of a string tensor; a PNG's ``bytes``.
    """

    step: int
    wall_time: float
    value: NDArray[Any] | bytes


class RunSource(Protocol):
    """Tags and their values of one run, by the name of the plugin that they were written for."""

    def tensor_tags(self, plugin_name: str) -> Mapping[str, int]:
        """Last step of each tensor tag."""

    def read_tensors(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[Point]]:
        """Values of each tag by ascending step; only the last ones if ``sampled``."""

    def scalar_tags(self) -> Sequence[str]:
        """All of them."""

    def read_scalars(self, tags: Sequence[str]) -> Mapping[str, Sequence[tuple[int, float]]]:
        """Steps and values of each tag, by ascending step."""

    def image_tags(self) -> Sequence[str]:
        """All of them."""

    def image_steps(self, tag: str) -> Sequence[int]:
        """The steps of which there is a picture, ascending."""

    def read_image(self, tag: str, step: int) -> bytes | None:
        """A PNG file; None if there is none."""

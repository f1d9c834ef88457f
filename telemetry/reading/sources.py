"""Where the data of one run is read from, whether TensorBoard's server or the files themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from telemetry.plain_text import printable

MAX_PROBLEMS = 50
"""Lines about one run; nobody reads more."""
_MAX_LINE = 200  # characters


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


class Problems(Iterable[str]):
    """What of a run was skipped and why: a line for each thing, the same one once.

    Args:
        tell: Called with each new line.
    """

    def __init__(self, tell: Callable[[str], object] | None = None) -> None:
        self._lines: dict[str, None] = {}
        self._tell = tell
        self._more = 0

    def add(self, what: str, why: object) -> None:
        """Notes that a file, a tag or a part of one was skipped; very many are only counted."""
        line = f"skipped {_shortened(what)}: {_shortened(str(why))}"
        if line in self._lines:
            return
        if len(self._lines) == MAX_PROBLEMS:
            self._more += 1
            return
        self._lines[line] = None
        if self._tell is not None:
            self._tell(line)

    def __iter__(self) -> Iterator[str]:
        yield from self._lines
        if self._more:
            yield f"skipped {self._more} more"

    def __len__(self) -> int:
        return len(self._lines) + bool(self._more)


def _shortened(text: str) -> str:
    return printable(text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}…")


class RunSource(Protocol):
    """Tags and their values of one run, by the name of the plugin that they were written for.

    Attributes:
        problems: What was skipped; whoever finds more in the values adds it.
    """

    problems: Problems

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

"""Interface to the data of one run: TensorBoard's server or the event files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from telemetry.plain_text import printable

# Lines about one run.
MAX_PROBLEMS = 50
_MAX_LINE = 200  # characters


class Problems(Iterable[str]):
    """Lines about skipped parts of a run, with the reasons; equal lines appear once.

    ``report`` is called with each new line.
    """

    def __init__(self, report: Callable[[str], object] | None = None) -> None:
        self._lines: dict[str, None] = {}
        self._report = report
        self._more = 0

    def add(self, what: str, why: object) -> None:
        """Add a line for a skipped file, tag or part of one; count it if there are many."""
        line = f"skipped {_shortened(what)}: {_shortened(str(why))}"
        if line in self._lines:
            return
        if len(self._lines) == MAX_PROBLEMS:
            self._more += 1
            return
        self._lines[line] = None
        if self._report is not None:
            self._report(line)

    def __iter__(self) -> Iterator[str]:
        yield from self._lines
        if self._more:
            yield f"skipped {self._more} more"


def _shortened(text: str) -> str:
    return printable(text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}…")


class RunSource(Protocol):
    """Tags of one run and their values, by plugin.

    Attributes:
        problems: Skipped parts; readers of the values add more.
    """

    problems: Problems

    def tags(self, plugin_name: str) -> Mapping[str, int]:
        """Return the last step of each tag of a plugin: ``scalars``, ``histograms``, ``images``."""

    def read(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        """Return steps and values of each tag by ascending step; if ``sampled``, the last alone.

        Values of ``scalars`` are floats, others are arrays or the ``bytes`` of a text. Values of
        ``images`` have no meaning.
        """

    def picture(self, tag: str, step: int) -> bytes | None:
        """Return a PNG file; None if the step has none."""

"""What a source of one run's data offers, be it TensorBoard's server or the event files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from telemetry.plain_text import printable

# Lines about one run; nobody reads more than that.
MAX_PROBLEMS = 50
_MAX_LINE = 200  # characters


class Problems(Iterable[str]):
    """Lines that say which parts of a run were skipped and why; equal lines appear once.

    ``report`` is called with each new line.
    """

    def __init__(self, report: Callable[[str], object] | None = None) -> None:
        self._lines: dict[str, None] = {}
        self._report = report
        self._more = 0

    def add(self, what: str, why: object) -> None:
        """Adds a line for a skipped file, tag or part of one; after many lines, only counts."""
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
    """Tags of one run and their values, by the plugin that they were written for.

    Attributes:
        problems: What was skipped; code that finds more problems in the values adds them.
    """

    problems: Problems

    def tags(self, plugin_name: str) -> Mapping[str, int]:
        """Last step of each tag; the plugins of TensorBoard are ``scalars``, ``histograms`` and
        ``images``."""

    def read(
        self, plugin_name: str, tags: Sequence[str], *, sampled: bool = False
    ) -> Mapping[str, Sequence[tuple[int, Any]]]:
        """Steps and values of each tag by ascending step; only the last one if ``sampled``.

        A value is a float of ``scalars``, else an array, or the ``bytes`` of a text. Of ``images``
        only the steps mean something.
        """

    def picture(self, tag: str, step: int) -> bytes | None:
        """A PNG file; None if the step has none."""

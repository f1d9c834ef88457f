"""Reads statistics of any number of steps in pieces that fit into memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from telemetry.reading.matrix import Matrix, Region
from telemetry.reading.run_data import RunData


def windows(
    runs: Sequence[RunData], statistics: Sequence[str], region: Region | None = None
) -> Iterator[list[list[Matrix]]]:
    """A matrix for each run and each statistic, window by window of steps; no step is left out.

    Args:
        runs: The runs; a window is the same range of steps in all of them.
        statistics: Names of statistics that the page shows.
        region: All steps by default.
    """
    if region is None:
        overviews = [run.overview() for run in runs]
        first = min(overview.first_step for overview in overviews)
        region = Region(first_step=first, last_step=max(o.last_step for o in overviews))
    matrices = [[run.matrix(name, region) for name in statistics] for run in runs]
    first, last = region.first_step or 0, region.last_step or 0
    if first < last and any(matrix.sampled for of_run in matrices for matrix in of_run):
        middle = (first + last) // 2
        yield from windows(runs, statistics, Region(first_step=first, last_step=middle))
        yield from windows(runs, statistics, Region(first_step=middle + 1, last_step=last))
    else:
        yield matrices

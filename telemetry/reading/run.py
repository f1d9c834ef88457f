"""``telemetry.read``: find runs, and read their numbers as tables, without TensorBoard's server."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.alert import Alert, listed_alerts
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.plain_text import closest, html_table, natural_key
from telemetry.reading.distributions import histogram_table
from telemetry.reading.matrix import UnitExtremes
from telemetry.reading.run_data import RunData
from telemetry.reading.run_log import RunDirectory, is_run_log
from telemetry.tag_names import plain

Table: TypeAlias = Any
"""A ``pandas.DataFrame``; where pandas is not installed, a dict of arrays by column."""


class Run:
    """Records of a run up to now; its alerts are in the order of their steps.

    A directory that several runs have used holds the newest of them, and names the ``earlier`` ones
    as :func:`read` takes them.
    """

    def __init__(self, log_dir: Path) -> None:
        self.log_dir = log_dir
        self._data = open_run(log_dir, needs_log=False)
        self.earlier: tuple[str, ...] = tuple(
            [f"{log_dir}@{run}" for run in self._data.directory.runs if run != self._data.run]
        )
        self.alerts: tuple[Alert, ...] = self._data.alerts

    def __repr__(self) -> str:
        return f"<Run {str(self.log_dir)!r} {self._data.extent}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks."""
        rows = {"records": self._data.extent, **self.hparams}
        return html_table(str(self.log_dir), {**rows, "alerts": listed_alerts(self.alerts)})

    @property
    def problems(self) -> tuple[str, ...]:
        """One line for each unreadable part of the directory."""
        return tuple(self._data.problems)

    @property
    def hparams(self) -> dict[str, str | float | bool]:
        """Hyperparameters given to ``HookLogger.hparams``."""
        return self._data.hyperparameters()

    @property
    def estimated(self) -> bool:
        """Whether zeros, NaN, infinities and kurtosis are those of a sample, as on an accelerator.

        Whether there is any NaN or infinity is exact.
        """
        return self._data.estimated()

    @cached_property
    def scalars(self) -> Table:
        """All curves, a row for each point: columns ``tag``, ``step``, ``value``.

        Tags do not contain TensorBoard's group, such as ``~run/``.
        """
        series: dict[str, list[tuple[int, float]]] = {}
        source = self._data.source
        for tag, curve in source.read("scalars", list(source.tags("scalars"))).items():
            series.setdefault(plain(tag), []).extend(curve)
        points = [point for each in series.values() for point in each]
        steps = np.array([step for step, _ in points], np.int64)
        values = np.array([value for _, value in points], np.float64)
        codes = np.repeat(np.arange(len(series)), [len(each) for each in series.values()])
        return _table(tag=(codes, list(series)), step=steps, value=values)

    @cached_property
    def layers(self) -> Table:
        """Statistics of the Telemetry page, a row for each measured number.

        Columns ``statistic``, ``step``, ``module_name``, ``type_name``, ``value``. NaN is a
        measured NaN.
        """
        names = [statistic.name for statistic in PAGE_STATISTICS]
        found: list[tuple[NDArray[Any], ...]] = []
        for place, name in enumerate(names):
            matrix = self._data.matrix(name)
            columns, rows = np.nonzero(matrix.values != MISSING)
            numbers = matrix.values[columns, rows]
            found.append((np.full(len(rows), place), matrix.steps[columns], rows, numbers))
        places, steps, rows, values = map(np.concatenate, zip(*found, strict=True))
        layers = self._data.layers
        return _table(
            statistic=(places, names),
            step=steps,
            module_name=(rows, [layer.name for layer in layers]),
            type_name=(rows, [layer.type_name for layer in layers]),
            value=values,
        )

    def units(self, layer: str) -> UnitExtremes:
        """Return the extremes of each unit or channel of a layer at full steps.

        Args:
            layer: Its name, as in the column ``module_name`` of :attr:`layers`.

        Returns:
            Arrays ``[steps, units]``; without recorded units, no step.

        Raises:
            KeyError: The run does not have the layer.
            TypeError: ``layer`` is no string.
        """
        names = [known.name for known in self._data.layers]
        if layer not in names:
            if not isinstance(layer, str):
                raise TypeError(f"units(layer={layer!r}): must be the name of a layer")
            raise KeyError(f"no layer {layer!r}; {closest(layer, names)}")
        return self._data.units(layer)

    @cached_property
    def modules(self) -> Table:
        """The layers in forward order, and their source locations.

        Columns ``module_name``, ``type_name``, ``state`` (what its parameters did at the last full
        step: ``trains``, ``learning rate 0``, ``no gradient``, ``not in an optimizer`` or
        ``frozen``; empty without parameters), ``forward`` (file and line) and ``user_code``: the
        same if that is your own code, else the location and name of the nearest enclosing module.
        """
        layers = self._data.layers
        rows = np.arange(len(layers))
        return _table(
            module_name=(rows, [layer.name for layer in layers]),
            type_name=(rows, [layer.type_name for layer in layers]),
            state=(rows, self._data.training_states()),
            forward=(rows, [layer.forward for layer in layers]),
            user_code=(rows, [str(layer.user_code or "") for layer in layers]),
        )

    @property
    def histogram_tags(self) -> tuple[str, ...]:
        """The tags of :meth:`histogram`."""
        return tuple(map(plain, sorted(self._data.source.tags("histograms"))))

    def histogram(self, tag: str) -> Mapping[int, NDArray[np.float64]]:
        """Return the histograms of a tag such as ``grad/0002.fc1.weight``.

        Returns:
            By step: left edge, right edge and count of each bucket, shape ``[buckets, 3]``.

        Raises:
            KeyError: The run does not have the tag.
        """
        source, tag = self._data.source, plain(tag)
        found = source.read("histograms", [t for t in source.tags("histograms") if plain(t) == tag])
        if not found:
            raise KeyError(f"no histograms {tag!r}; {closest(tag, self.histogram_tags)}")
        *_, series = found.values()
        return {step: histogram_table(value) for step, value in series}


def read(run: str | os.PathLike[str]) -> Run:
    """Read a run.

    Args:
        run: Its directory, or one with a single run somewhere below; ``directory@id`` is an
            earlier run in the same directory.

    Raises:
        OSError: There are no files of a run, or they cannot be read.
        ValueError: There are several runs.
        TypeError: ``run`` is no path.
    """
    if not isinstance(run, str | os.PathLike):
        raise TypeError(f"read(run={run!r}): must be the directory of a run")
    return Run(only_log_dir(Path(os.path.expanduser(run))))


def _table(**columns: NDArray[Any] | tuple[NDArray[np.intp], Sequence[str]]) -> Table:
    """Make a table; a column of texts is given as indices into a list of distinct texts."""
    try:
        import pandas as pd
    except ImportError:
        pd = None
    table: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column, tuple):
            places, texts = column
            distinct = list(dict.fromkeys(texts))
            known = np.array(texts, str) if pd is None else pd.Categorical(texts, distinct)
            table[name] = known[places]
        else:
            table[name] = column
    return table if pd is None else pd.DataFrame(table)


class NoTelemetryError(ValueError):
    """Event files without a run log."""

    REASON = (
        "no run log (telemetry.*.runlog): no step is recorded yet, another program has written the "
        "event files, or they were copied without it. TensorBoard shows their curves, and "
        "telemetry lint judges the loss"
    )


def is_of_run(name: str) -> bool:
    """Whether a file with this name is of a run: a run log or an event file."""
    return is_run_log(name) or "tfevents" in name


def find_log_dirs(
    path: Path,
    *,
    is_of_run: Callable[[str], bool] = is_of_run,
    skipped: Callable[[OSError], object] = lambda error: None,
) -> Iterator[Path]:
    """Yield the directories of runs at and below ``path``, in natural order; links are followed.

    ``skipped`` is called with the error of each directory below that cannot be read.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the directory of the run: {path.parent}")
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    seen: set[str] = set()
    for folder, folders, names in os.walk(path, onerror=skipped, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a circular or repeated link
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=natural_key)
        if any(map(is_of_run, [*folders, *names])):
            yield Path(folder)


def split_run(path: Path) -> tuple[Path, str]:
    """Return directory and id of a run ``directory@id``; without ``@id`` the id is empty."""
    name, at, run = path.name.rpartition("@")
    return (path.with_name(name), run) if at and name and not path.exists() else (path, "")


def open_run(log_dir: Path, *, needs_log: bool = True) -> RunData:
    """Open the newest run in a directory, or the run ``directory@id``.

    A run that ended before its first step may have alerts alone; one without a run log has curves
    and histograms. It raises FileNotFoundError, NoTelemetryError, or another ValueError if the run
    log cannot be read.
    """
    path, run = split_run(log_dir)
    found = RunData(RunDirectory(path), run)
    if not found.layers and not found.alerts and found.end() is None:
        if run:
            raise FileNotFoundError(f"{path} holds no run {run}")
        if not any(map(is_of_run, os.listdir(path))):
            raise FileNotFoundError(f"neither a run log nor event files in {path}")
        if problem := next(iter(found.directory.problems), ""):
            raise ValueError(problem)
        if needs_log:
            raise NoTelemetryError(f"{path}: {NoTelemetryError.REASON}")
        found.directory.problems.add("layers and alerts", "there is no run log, telemetry.*.runlog")
    return found


def only_log_dir(path: Path, skipped: Callable[[OSError], object] = lambda error: None) -> Path:
    """Return the directory of a run: ``path``, or the only one below it; ValueError: several."""
    if split_run(path)[1]:
        return path
    found = list(find_log_dirs(path, skipped=skipped))
    if not found:
        raise FileNotFoundError(f"neither a run log nor event files in {path}")
    if path in found or len(found) == 1:
        return found[0]
    names = ", ".join(str(log_dir.relative_to(path)) for log_dir in found[:10])
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    raise ValueError(f"{path} holds {len(found)} runs; choose one of them: {names}{more}")

"""Find the runs below a directory, and open them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from telemetry.events import list_event_files
from telemetry.reading.files import FileSource
from telemetry.reading.run_data import RunData


class NoTelemetryError(ValueError):
    """Event files that telemetry did not write."""

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        super().__init__(f"{os.fspath(log_dir)}: has event files, but no telemetry data")


def natural_key(text: str) -> list[str | int]:
    """Return a sort key that puts ``run10`` behind ``run9``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", text)]


def has_event_files(path: Path) -> bool:
    return bool(list_event_files(path))


def find_log_dirs(
    path: Path,
    *,
    is_log_dir: Callable[[Path], bool] = has_event_files,
    skipped: Callable[[OSError], object] = lambda error: None,
) -> Iterator[Path]:
    """Yield the directories of runs at and below ``path``, in natural order; links are followed.

    ``skipped`` is called with the reason for each directory that cannot be read.

    Raises:
        OSError: ``path`` is not a directory, or cannot be read.
    """
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; give the directory of the run: {path.parent}")
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    seen: set[str] = set()
    for folder, folders, _ in os.walk(path, onerror=skipped, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # a circular or repeated link
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=natural_key)
        try:
            if is_log_dir(Path(folder)):
                yield Path(folder)
        except OSError as error:
            skipped(error)


def open_run(log_dir: str | os.PathLike[str]) -> RunData:
    """Open the run in a directory; a run that ended before its first step may have alerts alone.

    Raises:
        FileNotFoundError: There are no event files.
        NoTelemetryError: They hold no telemetry data.
        NewerFormatError: They hold data of a later version only.
    """
    run = RunData(FileSource(log_dir))
    found = run.overview()
    if not found.layers and not found.alerts:
        raise NoTelemetryError(log_dir)
    return run


def only_log_dir(path: Path, skipped: Callable[[OSError], object] = lambda error: None) -> Path:
    """Return the directory of a run: ``path``, or the only one below it.

    Raises:
        OSError: ``path`` cannot be read, or has no run.
        ValueError: There are several runs.
    """
    found = list(find_log_dirs(path, skipped=skipped))
    if not found:
        raise FileNotFoundError(f"no event files in {path}")
    if path in found or len(found) == 1:
        return found[0]
    names = ", ".join(str(log_dir.relative_to(path)) for log_dir in found[:10])
    more = f" and {len(found) - 10} more" if len(found) > 10 else ""
    raise ValueError(f"{path} holds {len(found)} runs; choose one of them: {names}{more}")

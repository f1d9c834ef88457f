"""Find and open the runs of a command's arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from telemetry.commands.output import reason, report_problems
from telemetry.reading.log_dirs import NoTelemetryError, find_log_dirs, has_event_files, open_run
from telemetry.reading.run_data import RunData


class LogDirs:
    """Directories of runs at and below the given paths; problems are reported on stderr.

    Attributes:
        found: The directories, each once.
        status: For the shell: 2 if a path or a run could not be read, else 0.
    """

    def __init__(
        self, paths: Sequence[Path], is_log_dir: Callable[[Path], bool] = has_event_files
    ) -> None:
        self.found: list[Path] = []
        self.status = 0
        self._given = paths
        for path in paths:
            try:
                below = list(find_log_dirs(path, is_log_dir=is_log_dir, skipped=report_skipped))
            except OSError as error:
                self.fail(error)
                continue
            if not below:
                self.fail(FileNotFoundError(f"no event files in {path}"))
            self.found += [log_dir for log_dir in below if log_dir not in self.found]

    def opened(self) -> Iterator[tuple[Path, RunData]]:
        """Yield each run with its directory; directories of other programs are skipped."""
        opened = False
        for log_dir in self.found:
            run = self.open(log_dir)
            if run is not None:
                opened = True
                yield log_dir, run
                report_problems(run.source.problems)
        self.status = self.status if opened else 2

    def open(self, log_dir: Path) -> RunData | None:
        """Open the run in a found directory; None if that is impossible."""
        try:
            return open_run(log_dir)
        except (OSError, ValueError) as error:
            if isinstance(error, NoTelemetryError) and log_dir not in self._given:
                report_skipped(error)
            else:
                self.fail(error)
        return None

    def fail(self, error: OSError | ValueError) -> None:
        report_problems([reason(error)])
        self.status = 2


def report_skipped(error: OSError | ValueError) -> None:
    report_problems([f"skipped {reason(error)}"])

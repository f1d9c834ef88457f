"""Alerts as lines of JSON beside the event file, for programs that watch a run."""

from __future__ import annotations

import os
from pathlib import Path

from telemetry.alert import Alert
from telemetry.events.plain_files import PlainFiles
from telemetry.page_format import encode_alert


class AlertFile:
    """Appends each alert to ``<log_dir>/alerts.jsonl``; runs in one directory share the file.

    The fields are those of :func:`~telemetry.records.alert_fields`, and also ``session``, the
    logger's id, and ``wall_time``, when the step ended in seconds since the epoch. Remote
    directories have no such file.

    Args:
        log_dir: The run's directory.
        session: The id that the Telemetry page's data has, too; ids sort by age.
        files: Writes the lines in the background.
    """

    def __init__(self, log_dir: str | os.PathLike[str], *, session: str, files: PlainFiles) -> None:
        self._path = None if "://" in os.fspath(log_dir) else Path(log_dir) / "alerts.jsonl"
        self._session = session
        self._files = files

    def write(self, alert: Alert, wall_time: float) -> None:
        """Append one line in the background.

        Raises:
            OSError: ``files`` is closed.
        """
        if self._path is not None:
            line = encode_alert(alert, {"session": self._session, "wall_time": wall_time})
            self._files.append_line(self._path, line)

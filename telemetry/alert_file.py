"""Alerts as lines of JSON beside the event file, for programs that watch a run."""

from __future__ import annotations

import os
from pathlib import Path

from telemetry.plugin_data.format import encode_alert
from telemetry.records import Alert


class AlertFile:
    """Appends each alert to ``<log_dir>/alerts.jsonl``; runs in one directory share the file.

    The fields are those of :class:`Alert`; ``value`` and ``threshold`` are strings (``"nan"``,
    ``"inf"``, ``"-inf"``) where JSON has no number for them. Remote directories have no such file.

    Args:
        log_dir: The run's directory.
    """

    def __init__(self, log_dir: str | os.PathLike[str]) -> None:
        self._path = None if "://" in os.fspath(log_dir) else Path(log_dir) / "alerts.jsonl"

    def write(self, alert: Alert) -> None:
        """Append one line.

        Raises:
            OSError: The file cannot be written.
        """
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(encode_alert(alert) + b"\n")

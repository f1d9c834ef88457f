"""``telemetry report``: a run as one HTML file."""

from __future__ import annotations

import argparse
import html
import os
from pathlib import Path

from rich.console import Console

from telemetry.commands.output import report_problems, report_skipped
from telemetry.flight import explain, flight_files
from telemetry.plain_text import printable
from telemetry.reading.run import only_log_dir, open_run
from telemetry.reading.run_entry import hparams_content
from telemetry.tensorboard_plugin.report import report_html


def report(args: argparse.Namespace, console: Console) -> int:
    report_problems(write_report(only_log_dir(args.run, report_skipped), args.output))
    size = args.output.stat().st_size
    console.print(printable(f"{args.output} ({size / 1e6:.1f} MB)"))
    return 0


def write_report(log_dir: str | os.PathLike[str], path: str | os.PathLike[str]) -> list[str]:
    """Write the report of a run into an HTML file, and return a line for each skipped part.

    Raises:
        FileNotFoundError: ``log_dir`` holds no event files.
        ValueError: As for :func:`~telemetry.reading.run.open_run`.
        OSError: The file cannot be written.
    """
    run = open_run(log_dir)
    name = Path(log_dir).resolve().name
    page = report_html(name, run, hparams_content(run.source), _faults(log_dir))
    # The directory's name may not be valid UTF-8.
    Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    return list(run.source.problems)


def _faults(log_dir: str | os.PathLike[str]) -> str:
    """Return the section of the flight files; empty without any."""
    if not flight_files(log_dir):
        return ""
    try:
        text = explain(log_dir)
    except (OSError, ValueError) as error:
        text = str(error)
    return (
        '<section class="faults" aria-label="Flight records"><h2>Around alerts and exceptions</h2>'
        f"<pre>{html.escape(text)}</pre></section>"
    )

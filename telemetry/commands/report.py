"""``telemetry report``: runs as one HTML file."""

from __future__ import annotations

import argparse
import html
import io
import os
import time

from rich.console import Console

from telemetry.commands.explain import print_faults
from telemetry.commands.output import LogDirs, report_problems
from telemetry.plain_text import printable
from telemetry.reading.faults import faults_of
from telemetry.reading.run_data import RunData
from telemetry.reading.run_entry import row_of
from telemetry.tables import new_console
from telemetry.tensorboard_plugin.report import MAX_RUNS, report_html


def report(args: argparse.Namespace, console: Console) -> int:
    found = LogDirs(args.runs)
    runs = dict(found.opened())
    if len(runs) > MAX_RUNS:
        raise ValueError(f"a report is of at most {MAX_RUNS} runs, not of {len(runs)}")
    if runs:
        problems = {line for run in runs.values() for line in run.problems}  # they are reported
        base = os.path.commonpath([log_dir.resolve().parent for log_dir in runs])
        named = {os.path.relpath(log_dir.resolve(), base): run for log_dir, run in runs.items()}
        rows = [row_of(run, name, time.time()) for name, run in named.items()]
        page = report_html(named, rows, "".join(_faults(run, name) for name, run in named.items()))
        # The directory's name may not be valid UTF-8.
        args.output.write_text(page, encoding="utf-8", errors="backslashreplace")
        report_problems(
            line for run in runs.values() for line in run.problems if line not in problems
        )
        size = args.output.stat().st_size
        console.print(printable(f"{args.output} ({size / 1e6:.1f} MB)"))
    return found.status


def _faults(run: RunData, name: str) -> str:
    """Return the section about the faults of a run; empty without any."""
    if not (faults := [*faults_of(run)]):
        return ""
    print_faults(run, faults, new_console(text := io.StringIO()))
    return (
        '<section class="faults" aria-label="Faults"><h2>Around alerts and exceptions'
        f" of {html.escape(name)}</h2><pre>{html.escape(text.getvalue())}</pre></section>"
    )

"""``telemetry alerts``: the alerts of runs, and an exit status for scripts; their batches."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from telemetry.alert import Alert
from telemetry.commands.help import help_line
from telemetry.commands.output import LogDirs, print_records
from telemetry.plain_text import printable

# Severities that make the command fail, by the choice of ``--fail-on``.
FAIL_ON = {"warning": {"warning", "error"}, "error": {"error"}, "never": set[str]()}
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_RECORD = (
    "run", "step", "severity", "kind", "module_name", "stage", "value", "threshold", "summary",
    "cause", "advice", "location", "consequences", "observed_in", "batches",
)  # fmt: skip
_BATCH = ("run", "kind", "severity", "step", "rank", "ids")


def alerts(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    of_runs = [(str(log_dir), run.overview().alerts) for log_dir, run in runs.opened()]
    fails = print_alerts(of_runs, args, console, name_runs=len(runs.found) > 1)
    return runs.status or fails


def batches(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    records = {  # an alert that escalates blames them again
        (log_dir, alert.kind, batch): {
            "run": str(log_dir),
            "kind": alert.kind,
            "severity": alert.severity,
            **vars(batch),
        }
        for log_dir, run in runs.opened()
        for alert in run.overview().alerts
        for batch in alert.batches
    }
    print_records("json", _BATCH, records.values())
    return runs.status


def print_alerts(
    runs: Sequence[tuple[str, Sequence[Alert]]],
    args: argparse.Namespace,
    console: Console,
    *,
    name_runs: bool,
) -> bool:
    """Print the alerts of each run; return whether one of them counts for ``--fail-on``."""
    kinds: list[str] = []
    found = {a.severity for _, of_run in runs for a in of_run if a.stage != "resolved"}
    if args.form:
        records = ({"run": run, **vars(alert)} for run, of_run in runs for alert in of_run)
        print_records(args.form, _RECORD, records)
    else:
        for run, of_run in runs:
            head = f"{printable(run)}: " if name_runs else ""
            if not of_run:
                console.print(f"{head}no alerts")
            for alert in of_run:
                _print_alert(head, alert, console)
                kinds.append(alert.kind)
        if (line := help_line(kinds)) is not None:
            console.print(line)
    return bool(found & FAIL_ON[args.fail_on])


def _print_alert(head: str, alert: Alert, console: Console) -> None:
    stage = {"escalated": ", escalated", "resolved": ", resolved"}.get(alert.stage, "")
    line = Text(f"{head}step {alert.step}: ")
    line.append(alert.severity, style=_STYLES[alert.severity])
    line.append(printable(f" {alert.kind}{stage}") + alert.where)
    console.print(line)
    for text in alert.message.splitlines():
        console.print(f"  {printable(text)}")

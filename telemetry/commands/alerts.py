"""``telemetry alerts``: the alerts of runs, and an exit status for scripts."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from telemetry.alert import Alert, alert_fields
from telemetry.commands.arguments import Commands, add_command, add_form, add_runs
from telemetry.commands.opening import LogDirs
from telemetry.commands.output import print_records
from telemetry.plain_text import printable

_FAIL_ON = {"warning": {"warning", "error"}, "error": {"error"}, "never": set[str]()}
_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_RECORD = (
    "run", "step", "severity", "kind", "module_name", "stage", "value", "threshold", "message",
    "consequences",
)  # fmt: skip


def add_alerts(commands: Commands) -> None:
    parser = add_command(
        commands,
        "alerts",
        _alerts,
        does="print the alerts of runs; exit with 1 if there are any but notes",
        example="telemetry alerts runs/ --fail-on error",
    )
    add_runs(parser)
    parser.add_argument(
        "--fail-on",
        choices=_FAIL_ON,
        default="warning",
        help="how severe an alert must be to exit with 1 (default: %(default)s); notes never are",
    )
    add_form(parser)


def _alerts(args: argparse.Namespace, console: Console) -> int:
    runs = LogDirs(args.runs)
    found: set[str] = set()

    def alerts() -> Iterator[tuple[str, Alert | None]]:
        """The alerts of each run; None for a run without any."""
        for log_dir, run in runs.opened():
            of_run = run.overview().alerts
            found.update(alert.severity for alert in of_run if alert.stage != "end")
            yield from ((str(log_dir), alert) for alert in of_run or [None])

    if args.form:
        records = ({"run": run, **alert_fields(alert)} for run, alert in alerts() if alert)
        print_records(args.form, _RECORD, records)
    else:
        for run, alert in alerts():
            _print_alert(f"{printable(run)}: " if runs.several else "", alert, console)
    return runs.status or bool(found & _FAIL_ON[args.fail_on])


def _print_alert(head: str, alert: Alert | None, console: Console) -> None:
    if alert is None:
        console.print(Text(f"{head}no alerts"), soft_wrap=True)
        return
    stage = {"worse": ", worse", "end": ", over"}.get(alert.stage, "")
    line = Text(f"{head}step {alert.step}: ")
    line.append(alert.severity, style=_STYLES[alert.severity])
    line.append(printable(f" {alert.kind}{stage}") + alert.where)
    console.print(line, soft_wrap=True)
    for text in alert.message.splitlines():
        console.print(Text(f"  {printable(text)}"), soft_wrap=True)

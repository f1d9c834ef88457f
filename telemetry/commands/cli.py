"""The command ``telemetry``: report, summary, alerts and faults of a run, from its files."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from telemetry.alert import Alert
from telemetry.commands.report import write_report
from telemetry.events import list_event_files
from telemetry.flight import explain
from telemetry.layers import PAGE_STATISTICS, Statistic
from telemetry.plain_text import printable
from telemetry.reading.files import FileSource
from telemetry.reading.run_data import RunData
from telemetry.reading.run_summary import LayerSummary, summarize

_STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}
_STEADY = 1.25  # a trend by a smaller factor counts as steady
_MAX_ROWS = 1000  # rich takes a millisecond for each
_MAX_NAME = 200  # characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0, 1 for ``--fail-on``, 2 for an error."""
    args = _parser().parse_args(arguments)
    console = Console(highlight=False, emoji=False)
    try:
        return int(args.command(args, console))
    except (OSError, ValueError) as error:
        print(f"telemetry: {printable(str(error))}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="telemetry", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    report = commands.add_parser("report", help="write one HTML file with the picture and the data")
    report.add_argument(
        "-o", "--output", type=Path, default=Path("report.html"), help="%(default)s"
    )
    report.set_defaults(command=_report)

    summary = commands.add_parser("summary", help="print a table of all layers")
    names = [statistic.name for statistic in PAGE_STATISTICS]
    summary.add_argument("--statistic", choices=names, default=names[0], help="%(default)s")
    summary.set_defaults(command=_summary)

    alerts = commands.add_parser("alerts", help="print the alerts")
    alerts.add_argument(
        "--fail-on",
        choices=["warning", "error"],
        help="exit with 1 if an alert has this severity or a worse one; notes never count",
    )
    alerts.set_defaults(command=_alerts)

    explanation = commands.add_parser("explain", help="print what was recorded around a fault")
    explanation.set_defaults(command=_explain)

    for command in (report, summary, alerts, explanation):
        command.add_argument("run", type=Path, metavar="RUN", help="directory of the run")
    return parser


def _report(args: argparse.Namespace, console: Console) -> int:
    problems = write_report(_log_dir(args.run), args.output)
    _tell_problems(problems)
    console.print(Text(f"{args.output} ({args.output.stat().st_size / 1e6:.1f} MB)"))
    return 0


def _summary(args: argparse.Namespace, console: Console) -> int:
    statistic = next(known for known in PAGE_STATISTICS if known.name == args.statistic)
    with _opened(args.run) as run:
        overview = run.overview()
        layers = summarize(run, statistic, most=_MAX_ROWS)
    console.print(
        Text(
            f"{len(overview.layers)} layers, steps {overview.first_step} to {overview.last_step}, "
            f"alerts: {len(overview.alerts) or 'none'}"
        )
    )
    if not layers:
        console.print(Text(f"{statistic.title}: not measured in this run"))
        return 0
    console.print(_table(layers, statistic))
    if len(layers) == _MAX_ROWS < len(overview.layers):
        console.print(
            Text("only layers with alerts and the first ones; telemetry report shows all")
        )
    return 0


def _table(layers: Sequence[LayerSummary], statistic: Statistic) -> Table:
    table = Table(
        title=Text(statistic.title), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
    )
    table.add_column("layer", overflow="fold", min_width=12)
    table.add_column("class", no_wrap=True)
    for column in ("last", "median", "trend"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("over time", no_wrap=True, min_width=16)
    table.add_column("alerts", justify="right", min_width=6)
    for layer in layers:
        table.add_row(
            Text(printable(layer.name[:_MAX_NAME]) or "(the model)"),
            Text(printable(layer.type_name[:_MAX_NAME])),
            _number(layer.last),
            _number(layer.median),
            Text(_trend(layer.trend)),
            Text(layer.curve, style="cyan"),
            Text(str(layer.alert_count) if layer.alert_count else "", style="bold red"),
        )
    return table


def _alerts(args: argparse.Namespace, console: Console) -> int:
    with _opened(args.run) as run:
        alerts = run.overview().alerts
    for alert in alerts:
        _print_alert(alert, console)
    if not alerts:
        console.print(Text("no alerts"))
    found = {alert.severity for alert in alerts if alert.stage != "end"}
    fails = {"error": {"error"}, "warning": {"warning", "error"}, None: set()}[args.fail_on] & found
    return 1 if fails else 0


def _print_alert(alert: Alert, console: Console) -> None:
    stage = {"worse": ", worse", "end": ", over"}.get(alert.stage, "")
    where = f" in {alert.module_name}" if alert.module_name else ""
    head = Text(f"step {alert.step}: ")
    head.append(alert.severity, style=_STYLES[alert.severity])
    head.append(printable(f" {alert.kind}{stage}{where}"))
    console.print(head, soft_wrap=True)
    for line in (*alert.message.splitlines(), *alert.consequences):
        console.print(Text(f"  {printable(line)}"), soft_wrap=True)


def _explain(args: argparse.Namespace, console: Console) -> int:
    path = args.run if args.run.is_file() else _log_dir(args.run)
    for line in explain(path).splitlines():
        console.print(Text(printable(line)), soft_wrap=True)
    return 0


@contextmanager
def _opened(path: Path) -> Iterator[RunData]:
    """The run; at the end, what was skipped is printed."""
    log_dir = _log_dir(path)
    run = RunData(FileSource(log_dir))
    try:
        if not run.overview().layers:
            raise ValueError(f"{log_dir}: has event files, but no telemetry data")
        yield run
    finally:
        _tell_problems(run.source.problems)


def _log_dir(path: Path) -> Path:
    """The run's directory: ``path``, or the only run inside of it."""
    if not path.is_dir():
        raise FileNotFoundError(f"no such directory: {path}")
    if list_event_files(path):
        return path
    runs = [child for child in sorted(path.iterdir()) if _is_run(child)]
    if len(runs) == 1:
        return runs[0]
    if runs:
        names = ", ".join(run.name for run in runs[:10])
        raise ValueError(f"{path} holds {len(runs)} runs; choose one of them: {names}")
    raise FileNotFoundError(f"no event files in {path}")


def _is_run(path: Path) -> bool:
    try:
        return path.is_dir() and bool(list_event_files(path))
    except OSError as error:
        _tell_problems([f"skipped {printable(str(path))}: {error.strerror}"])
        return False


def _tell_problems(problems: Iterable[str]) -> None:
    for problem in problems:
        print(f"telemetry: {problem}", file=sys.stderr)


def _number(value: float) -> Text:
    return Text(f"{value:.3g}", style="" if math.isfinite(value) else "bold red")


def _trend(ratio: float) -> str:
    if math.isnan(ratio):
        return ""
    arrow = "↗" if ratio > _STEADY else "↘" if ratio < 1 / _STEADY else "→"
    return f"{arrow} ×{ratio:.2g}"


if __name__ == "__main__":
    sys.exit(main())

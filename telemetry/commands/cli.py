"""The program ``telemetry``: its commands and exit status."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from telemetry.commands.alerts import FAIL_ON, alerts, batches, lint
from telemetry.commands.diff import diff
from telemetry.commands.explain import explain_faults
from telemetry.commands.export import export
from telemetry.commands.help import print_help
from telemetry.commands.output import new_console, reason, report_problems
from telemetry.commands.report import report
from telemetry.commands.runs import runs
from telemetry.commands.summary import summary, units
from telemetry.layers import PAGE_STATISTICS
from telemetry.version import __version__

_EPILOG = """\
Help with examples for each command: telemetry summary --help

exit status:
  0: success; 1: alerts or lint found an alert, or diff a difference; 2: error

completion in bash and zsh, after pip install argcomplete:
  eval "$(register-python-argcomplete telemetry)"
"""
_EXAMPLES = {
    "runs": ["runs/ --sort best_loss", "runs/ --filter lr=0.1 --csv"],
    "summary": [
        "runs/mnist --statistic dead_units",
        "runs/mnist --sort update_ratio --reverse --top 5",
    ],
    "alerts": ["runs/ --fail-on error"],
    "batches": ["runs/mnist"],
    "lint": ["runs/", "out/checkpoint-500/trainer_state.json", "lightning_logs/*/metrics.csv"],
    "explain": ["runs/mnist", "runs/mnist/flight-120.json"],
    "help": ["", "dead_units"],
    "diff": ["runs/before runs/after --tolerance 1e-3"],
    "units": ["runs/mnist features.3 --step 300"],
    "report": ["runs/mnist -o report.html", "runs/before runs/after"],
    "export": ["runs/mnist -o mnist.csv --statistic grad_norm", "runs/mnist -o mnist.svg"],
}
_STATISTICS = tuple([statistic.name for statistic in PAGE_STATISTICS])
_NAMES = ", ".join(_STATISTICS)

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0; 1 for a finding; 2 after an error."""
    if arguments is None:
        _behave_in_pipes()
    parser = _parser()
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(arguments)
    try:
        return int(args.command(args, new_console()))
    except (OSError, ValueError) as error:
        report_problems([reason(error)])
        return 2


def _behave_in_pipes() -> None:
    """End silently when a pipe closes, as behind ``| head``; escape unencodable characters."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telemetry",
        description="Inspect recorded runs from their files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"telemetry {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    of_summary = _command(commands, "summary", summary, "print a table of all layers")
    _add_runs(of_summary)
    shown = f"statistic to show (default: that of --sort, or {_STATISTICS[0]}): {_NAMES}"
    _add_statistic(of_summary, shown)
    sort = "sort by the last value of this statistic, the largest first (default: "
    sort += "forward order; with --top or --reverse, the shown statistic)"
    of_summary.add_argument("--sort", choices=_STATISTICS, metavar="STATISTIC", help=sort)
    _add_reverse(of_summary)
    of_summary.add_argument("--top", type=int, metavar="N", help="show only the first N layers")
    _add_form(of_summary)

    does = "print status, loss, first alert and hyperparameters of runs, the newest first"
    of_runs = _command(commands, "runs", runs, does)
    _add_runs(of_runs)
    sort = "column or hyperparameter, such as best_loss or lr (default: %(default)s)"
    of_runs.add_argument("--sort", metavar="KEY", default="started", help=sort)
    _add_reverse(of_runs)
    words = "show only runs with all these words and comparisons: name, status, alert, or lr<1e-3"
    of_runs.add_argument("--filter", metavar="WORDS", help=words)
    _add_form(of_runs)

    does = "print the alerts of runs; exit with 1 if there are any above a note"
    of_alerts = _command(commands, "alerts", alerts, does)
    _add_runs(of_alerts)
    _add_fail_on(of_alerts)
    _add_form(of_alerts)

    does = "print the batches that alerts blame, with their ids, as JSON"
    _add_runs(_command(commands, "batches", batches, does))

    does = "judge the loss and gradient norm that any program has logged"
    of_lint = _command(commands, "lint", lint, does)
    what = "TensorBoard directory, trainer_state.json of Transformers, or CSV file of Lightning"
    of_lint.add_argument("paths", nargs="+", type=Path, metavar="PATH", help=what)
    of_lint.add_argument("--loss", metavar="TAG", help="tag of the loss (default: found by name)")
    of_lint.add_argument("--norm", metavar="TAG", help="tag of the gradient norm, in the same way")
    _add_fail_on(of_lint)
    _add_form(of_lint)

    does = "print the flight records around alerts and exceptions"
    of_explain = _command(commands, "explain", explain_faults, does)
    _add_runs(of_explain, ", or a flight-<step>.json from it")
    _add_form(of_explain)

    of_help = _command(commands, "help", print_help, "explain a kind of alert, or list all kinds")
    of_help.add_argument("kind", nargs="?", metavar="KIND", help="kind of alert, as dead_units")

    does = "print the first step and layer where two runs diverge; exit with 1 if they do"
    of_diff = _command(commands, "diff", diff, does)
    _add_run(of_diff, "first")
    _add_run(of_diff, "second")
    of_diff.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="two numbers are equal up to this share of the larger one (default: %(default)s)",
    )
    _add_form(of_diff)

    does = "print the smallest and largest value of each unit of a layer, and the dead units"
    of_units = _command(commands, "units", units, does)
    _add_run(of_units, "run")
    of_units.add_argument("layer", metavar="LAYER", help="name of the layer, as in the summary")
    of_units.add_argument("--step", type=int, help="a full step (default: the last one)")
    _add_form(of_units)

    does = "write one HTML file with the page and the data of runs; of several, a comparison, too"
    of_report = _command(commands, "report", report, does)
    _add_runs(of_report)
    _add_output(of_report, "file to write (default: %(default)s)", default="report.html")

    does = "write all numbers of the page as CSV, a row per layer and step, or a heat map"
    of_export = _command(commands, "export", export, does)
    _add_runs(of_export)
    where = "file to write (default: stdout); .png and .svg are heat maps of one run"
    _add_output(of_export, where)
    shown = "column, or statistic of the heat map; may be repeated (default: all, or grad_norm): "
    _add_statistic(of_export, shown + _NAMES, action="append")
    return parser


def _command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace, Console], int], does: str
) -> argparse.ArgumentParser:
    """Add a parser for a command; ``does`` has no capital letter and no full stop."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=does,
        description=f"{does[0].upper()}{does[1:]}.",
        epilog="\n".join(
            ["example:", *(f"  telemetry {name} {e}".rstrip() for e in _EXAMPLES[name])]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    return parser


def _add_run(parser: argparse.ArgumentParser, name: str) -> None:
    what = "directory of a run, or a directory with a single run somewhere below"
    parser.add_argument(name, type=Path, metavar="RUN", help=what)


def _add_runs(parser: argparse.ArgumentParser, or_file: str = "") -> None:
    what = f"directory of a run, or of runs at any depth, such as runs/{or_file}"
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=what)


def _add_statistic(parser: argparse.ArgumentParser, what: str, **options: Any) -> None:
    parser.add_argument("--statistic", choices=_STATISTICS, metavar="NAME", help=what, **options)


def _add_reverse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--reverse", action="store_true", help="sort the other way round")


def _add_fail_on(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-on",
        choices=FAIL_ON,
        default="warning",
        help="severity of an alert for exit status 1 (default: %(default)s): error: the run is "
        "lost or wrong; warning: worth a look; notes never count",
    )


def _add_output(parser: argparse.ArgumentParser, what: str, default: str | None = None) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", default=default, help=what)


def _add_form(parser: argparse.ArgumentParser) -> None:
    forms = parser.add_mutually_exclusive_group()
    for form, what in (("json", "a list of objects"), ("csv", "a table with a heading")):
        forms.add_argument(
            f"--{form}", dest="form", action="store_const", const=form, help=f"print {what}"
        )


if __name__ == "__main__":
    sys.exit(main())

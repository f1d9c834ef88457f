"""The program ``telemetry``: its commands and exit status."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console

from telemetry.commands.alerts import FAIL_ON, alerts, print_help
from telemetry.commands.explain import explain_faults
from telemetry.commands.lint import FORMATS, lint
from telemetry.commands.output import reason, report_problems
from telemetry.commands.report import report
from telemetry.commands.runs import diff, runs
from telemetry.commands.summary import summary
from telemetry.layers import PAGE_STATISTICS
from telemetry.tables import new_console
from telemetry.version import __version__

_EPILOG = """\
Help with examples for each command: telemetry summary --help

exit status:
  0: success; 1: alerts or lint found an alert, or diff a difference; 2: error

completion in bash and zsh, after pip install argcomplete:
  eval "$(register-python-argcomplete telemetry)"
"""
_STATISTICS = tuple([statistic.name for statistic in PAGE_STATISTICS])
_NAMES = ", ".join(_STATISTICS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0; 1 for a finding; 2 after an error."""
    if arguments is None:
        _behave_in_pipes()
    parser = _parser()
    with suppress(ImportError):
        import argcomplete

        argcomplete.autocomplete(parser)
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 2
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
    commands = parser.add_subparsers(metavar="COMMAND")
    parser.set_defaults(command=None)

    def command(
        run: Callable[[argparse.Namespace, Console], int],
        name: str,
        does: str,
        examples: Sequence[str],
        *parents: argparse.ArgumentParser,
    ) -> Callable[..., argparse.Action]:
        """Add a command, which ``does`` something, and return what adds its own arguments."""
        added = commands.add_parser(
            name,
            help=does,
            description=f"{does[0].upper()}{does[1:]}.",
            epilog="\n".join(["example:", *(f"  telemetry {name} {e}".rstrip() for e in examples)]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            parents=parents,
        )
        added.set_defaults(command=run)
        return added.add_argument

    path: Any = {"type": Path, "metavar": "RUN"}
    a_run = "directory of a run, or a directory with a single run somewhere below; directory@id is "
    a_run += "an earlier run in the same directory"
    of_runs, reverse, fail_on, form = (argparse.ArgumentParser(add_help=False) for _ in range(4))
    all_runs = "directory of a run, or of runs at any depth, such as runs/"
    of_runs.add_argument("runs", nargs="+", help=all_runs, **path)
    reverse.add_argument("--reverse", action="store_true", help="sort the other way round")
    severity = "severity of an alert for exit status 1 (default: %(default)s): error: the run is "
    severity += "lost or wrong; warning: worth a look; notes never count"
    fail_on.add_argument("--fail-on", choices=FAIL_ON, default="warning", help=severity)
    forms = form.add_mutually_exclusive_group()
    chosen: Any = {"dest": "form", "action": "store_const"}
    forms.add_argument("--json", const="json", help="print a list of objects", **chosen)
    forms.add_argument("--csv", const="csv", help="print a table with a heading", **chosen)

    does = "print a table of all layers"
    examples = ["runs/mnist --statistic dead_units"]
    examples += ["runs/mnist --sort update_ratio --reverse --top 5"]
    add = command(summary, "summary", does, examples, of_runs, reverse, form)
    shown = f"statistic to show (default: that of --sort, or {_STATISTICS[0]}): {_NAMES}"
    add("--statistic", choices=_STATISTICS, metavar="NAME", help=shown)
    sort = "sort by the last value of this statistic, the largest first (default: "
    sort += "forward order; with --top or --reverse, the shown statistic)"
    add("--sort", choices=_STATISTICS, metavar="STATISTIC", help=sort)
    add("--top", type=int, metavar="N", help="show only the first N layers")

    does = "print status, loss, worst alert and hyperparameters of runs, the newest first"
    examples = ["runs/ --sort best_loss", "runs/ --filter lr=0.1 --csv"]
    add = command(runs, "runs", does, examples, of_runs, reverse, form)
    sort = "column or hyperparameter, such as best_loss or lr (default: %(default)s)"
    add("--sort", metavar="KEY", default="started", help=sort)
    words = "show only runs with all these words and comparisons: name, status, alert, or lr<1e-3"
    add("--filter", metavar="WORDS", help=words)

    does = "print the alerts of runs; exit with 1 if there are any above a note"
    examples = ["runs/ --fail-on error", "runs/mnist --json --follow"]
    add = command(alerts, "alerts", does, examples, of_runs, fail_on, form)
    follow = "print alerts as they come, until Ctrl-C; with --json, an object in each line"
    add("--follow", action="store_true", help=follow)

    does = "judge the loss and gradient norm that any program has logged"
    examples = ["runs/", "out/checkpoint-500/trainer_state.json", "lightning_logs/*/metrics.csv"]
    add = command(lint, "lint", does, examples, fail_on, form)
    add("paths", nargs="+", type=Path, metavar="PATH", help=FORMATS)
    add("--loss", metavar="TAG", help="tag of the loss (default: found by name)")
    add("--norm", metavar="TAG", help="tag of the gradient norm, in the same way")

    does = "print the steps, layers and random state around errors, loss spikes and exceptions"
    command(explain_faults, "explain", does, ["runs/mnist"], of_runs, form)

    does = "explain a kind of alert, or list all kinds"
    add = command(print_help, "help", does, ["", "dead_units"])
    add("kind", nargs="?", metavar="KIND", help="kind of alert, as dead_units")

    does = "print the first step and layer where two runs diverge; exit with 1 if they do"
    add = command(diff, "diff", does, ["runs/before runs/after --tolerance 1e-3"], form)
    add("first", help=a_run, **path)
    add("second", help=a_run, **path)
    share = "two numbers are equal up to this share of the larger one (default: %(default)s)"
    add("--tolerance", type=float, default=0.0, metavar="SHARE", help=share)

    does = "write one HTML file with the page and the data of runs; of several, a comparison, too"
    add = command(report, "report", does, ["runs/mnist -o report.html", "runs/a runs/b"], of_runs)
    where = "file to write (default: %(default)s)"
    add("-o", "--output", default="report.html", type=Path, metavar="FILE", help=where)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The command ``telemetry``: its commands, and what it returns to the shell."""

from __future__ import annotations

import argparse
import io
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from telemetry.commands.alerts import add_alerts
from telemetry.commands.diff import add_diff
from telemetry.commands.explain import add_explain
from telemetry.commands.export import add_export
from telemetry.commands.output import new_console, reason, tell_problems
from telemetry.commands.report import add_report
from telemetry.commands.summary import add_summary
from telemetry.version import __version__

_EPILOG = """\
Each command has a help with an example: telemetry summary --help

exit status:
  0, or 1 if alerts found an alert or diff a difference, or 2 after an error

completion in bash and zsh, after pip install argcomplete:
  eval "$(register-python-argcomplete telemetry)"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0; 1 for a finding; 2 after an error."""
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
        tell_problems([reason(error)])
        return 2


def _behave_in_pipes() -> None:
    """Ends silently when nobody reads any more, as behind ``| head``; escapes what has no bytes."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="telemetry",
        description="Looks at runs that telemetry recorded, from their files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"telemetry {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in (add_summary, add_alerts, add_explain, add_diff, add_report, add_export):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""The ``telemetry`` command, run in this process."""

from __future__ import annotations

from telemetry.commands.cli import main


def run(*arguments: object) -> int:
    """Return the exit status of ``telemetry <arguments>``; output goes to ``sys.stdout``."""
    return main([str(argument) for argument in arguments])

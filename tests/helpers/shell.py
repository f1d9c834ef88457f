"""The ``telemetry`` command, run in this process, and its records."""

from __future__ import annotations

import csv
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from subprocess import CompletedProcess
from typing import Any

import pytest

from telemetry.commands.cli import main


def run(*arguments: object) -> int:
    """Return the exit status of ``telemetry <arguments>``; output goes to ``sys.stdout``."""
    return main([str(argument) for argument in arguments])


def call(*arguments: object) -> CompletedProcess[str]:
    """Return status and output of ``telemetry <arguments>``."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            status = run(*arguments)
        except SystemExit as ended:  # argparse
            status = int(ended.code or 0)
    return CompletedProcess(arguments, status, output.getvalue(), errors.getvalue())


def lines(*arguments: object, status: int = 0) -> list[str]:
    """Return the lines that the command prints when it ends with this status."""
    done = call(*arguments)
    assert done.returncode == status, done.stderr
    return done.stdout.splitlines()


def records(*arguments: object, status: int = 0) -> list[dict[str, Any]]:
    """Return what the command prints with ``--json``."""
    return parsed("\n".join(lines(*arguments, "--json", status=status)))


def parsed(text: str) -> list[dict[str, Any]]:
    """Return records of strict JSON."""
    found = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(found, list)
    return found


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of a CSV file, each in one line."""
    rows = list(csv.DictReader(text.splitlines()))
    assert len(rows) == len(text.splitlines()) - 1
    return rows

"""Runs a test's scenario in a fresh interpreter: one that can be killed, or forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path


def start_script(directory: Path, source: str, *arguments: object) -> subprocess.Popen[str]:
    """Start the source as a script, from a separate file because ``spawn`` imports it again."""
    script = directory / "scenario.py"
    script.write_text(textwrap.dedent(source))
    return subprocess.Popen(
        [sys.executable, str(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_script(directory: Path, source: str, *arguments: object) -> tuple[str, str]:
    """Run the script to its end; return its stdout and stderr."""
    with start_script(directory, source, *arguments) as process:
        try:
            output, log = process.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert process.returncode == 0, log
    return output, log

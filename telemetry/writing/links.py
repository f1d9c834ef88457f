"""Command that opens a run in TensorBoard."""

from __future__ import annotations

import logging
import os
import shlex
import sys

from telemetry.ranks.role import is_rank_0

log = logging.getLogger("telemetry")


def command(log_dir: str) -> str:
    """Return the command that starts TensorBoard on this run and its neighbors."""
    folder, run = os.path.split(log_dir.rstrip("/") or "/")
    if not run or folder.endswith(":"):  # "/", or the whole of a bucket
        folder = log_dir
    return f"tensorboard --logdir {shlex.quote(folder or '.')}"


_logged = False


def log_once(log_dir: str) -> None:
    """Show the command once per process.

    It is logged as INFO if that level is enabled. It is printed where logging is not configured, as
    in a notebook or a script, and to a terminal.
    """
    global _logged
    if _logged or not is_rank_0():
        return
    _logged = True
    if log.hasHandlers() and log.isEnabledFor(logging.INFO):
        log.info("%s", command(log_dir))
    elif sys.stderr is not None and (not log.hasHandlers() or sys.stderr.isatty()):
        print(command(log_dir), file=sys.stderr)

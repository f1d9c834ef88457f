"""The command and the links that open a run in TensorBoard."""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
from urllib.parse import quote

from telemetry.ranks.first_rank import is_first_rank
from telemetry.shared.tag_names import TOTAL_GRAD_NORM

log = logging.getLogger("telemetry")


def command(log_dir: str) -> str:
    """The command that starts TensorBoard on this run and its neighbors."""
    return f"tensorboard --logdir {shlex.quote(_folder_and_run(log_dir)[0])}"


_logged = False


def log_once(log_dir: str) -> None:
    """Log once in this process how to open its runs; without INFO logs, print it to a terminal."""
    global _logged
    if _logged or not is_first_rank():
        return
    _logged = True
    if log.isEnabledFor(logging.INFO):
        log.info("%s", command(log_dir))
    elif sys.stderr is not None and sys.stderr.isatty():
        print(command(log_dir), file=sys.stderr)


def how_to_look(log_dir: str, loss: str = "loss") -> str:
    """The command that starts TensorBoard on the run's parent, and two links into it, as lines.

    Args:
        log_dir: Of the run.
        loss: The tag of its loss.
    """
    root = "http://localhost:6006/"
    run = quote(_folder_and_run(log_dir)[1], safe="")
    cards = [{"plugin": "scalars", "tag": tag} for tag in (loss, TOTAL_GRAD_NORM)]
    pinned = quote(json.dumps(cards, separators=(",", ":")))
    return "\n".join(
        [
            f"{command(log_dir)} --port 6006",
            f"  layers over steps: {root}#telemetry&p.telemetry.run={run}",
            f"  curves:            {root}?smoothing=0&pinnedCards={pinned}#timeseries",
        ]
    )


def _folder_and_run(log_dir: str) -> tuple[str, str]:
    folder, run = os.path.split(log_dir.rstrip("/") or "/")
    if not run or folder.endswith(":"):  # "/", or the whole of a bucket
        return log_dir, "."
    return folder or ".", run

"""What to open in order to look at a run."""

from __future__ import annotations

import json
import os
import shlex
from urllib.parse import quote


def command(log_dir: str) -> str:
    """The command that starts TensorBoard on this run and its neighbors."""
    return f"tensorboard --logdir {shlex.quote(_folder_and_run(log_dir)[0])}"


def how_to_look(log_dir: str, *, port: int = 6006) -> str:
    """A command and two links, as lines of text.

    Args:
        log_dir: Of the run; its parent is what TensorBoard is started on.
        port: Where TensorBoard will listen.
    """
    root = f"http://localhost:{port}/"
    run = quote(_folder_and_run(log_dir)[1], safe="")
    cards = [{"plugin": "scalars", "tag": tag} for tag in ("loss", "grad_norm/total")]
    pinned = quote(json.dumps(cards, separators=(",", ":")))
    return "\n".join(
        [
            f"{command(log_dir)} --port {port}",
            f"  layers over steps: {root}#telemetry&p.telemetry.run={run}",
            f"  curves:            {root}?smoothing=0&pinnedCards={pinned}#timeseries",
        ]
    )


def _folder_and_run(log_dir: str) -> tuple[str, str]:
    folder, run = os.path.split(log_dir.rstrip("/") or "/")
    if not run or folder.endswith(":"):  # "/", or the whole of a bucket
        return log_dir, "."
    return folder or ".", run

"""The command and the links that open a run in TensorBoard."""

from __future__ import annotations

import json
import os
import shlex
from urllib.parse import quote

from telemetry.tag_names import TOTAL_GRAD_NORM


def command(log_dir: str) -> str:
    """The command that starts TensorBoard on this run and its neighbors."""
    return f"tensorboard --logdir {shlex.quote(_folder_and_run(log_dir)[0])}"


def how_to_look(log_dir: str, *, port: int = 6006) -> str:
    """The command that starts TensorBoard, and two links into it, as lines of text.

    Args:
        log_dir: The run's directory; TensorBoard is started on its parent.
        port: The port that TensorBoard will listen on.
    """
    root = f"http://localhost:{port}/"
    run = quote(_folder_and_run(log_dir)[1], safe="")
    cards = [{"plugin": "scalars", "tag": tag} for tag in ("loss", TOTAL_GRAD_NORM)]
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

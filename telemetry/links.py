"""What to open in order to look at a run."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote


def how_to_look(log_dir: str, *, port: int = 6006) -> str:
    """A command and two links, as lines of text.

    Args:
        log_dir: Of the run; its parent is what TensorBoard is started on.
        port: Where TensorBoard will listen.
    """
    path = Path(log_dir)
    parent, run = (path.parent, path.name) if path.name else (path, ".")
    root = f"http://localhost:{port}/"
    cards = [{"plugin": "scalars", "tag": tag} for tag in ("loss", "grad_norm/total")]
    pinned = quote(json.dumps(cards, separators=(",", ":")))
    return "\n".join(
        [
            f"tensorboard --logdir {parent} --port {port}",
            f"  layers over steps: {root}#telemetry&p.telemetry.run={quote(run, safe='')}",
            f"  curves:            {root}?smoothing=0&pinnedCards={pinned}#timeseries",
        ]
    )

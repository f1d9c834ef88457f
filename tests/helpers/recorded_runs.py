"""Recorded inputs of the rules in real runs, and the verdicts on them.

    python -m tests.helpers.recorded_runs

writes ``tests/data/recorded/verdicts.json`` again: only where a verdict was wrong.
``python benchmarks/replay.py record --out tests/data/recorded`` makes the recordings.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.helpers.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import replay

FOLDER = ROOT / "tests" / "data" / "recorded"
VERDICTS = FOLDER / "verdicts.json"
RUNS = {path.stem: path for path in sorted(FOLDER.glob("*.npz"))}
INTERVALS = (1, 10, 100)
FIELDS = ("kind", "step", "module_name", "severity", "stage", "value", "threshold")


def verdicts(path: Path) -> dict[str, list[list[Any]]]:
    """Return the fields of each alert by ``every_n_steps``; numbers have six digits."""
    rows = replay.replayed(path, INTERVALS)
    return {
        str(n): [[_rounded(alert[field]) for field in FIELDS] for alert in alerts]
        for n, (_, alerts, *_) in zip(INTERVALS, rows, strict=True)
    }


def _rounded(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


if __name__ == "__main__":
    found = {name: verdicts(path) for name, path in RUNS.items()}
    VERDICTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

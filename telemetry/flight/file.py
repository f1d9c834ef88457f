"""Flight files: what is in them as bytes, where they are, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telemetry.flight.document import FORMAT

MAX_BYTES = 8 * 2**20
"""A file that would be larger is written without its sketches."""


def flight_path(log_dir: Path, step: int) -> Path:
    return log_dir / f"flight-{step}.json"


def encode_flight(contents: Mapping[str, Any]) -> bytes:
    """The bytes of a file; without the sketches if it would be too large with them."""
    text = _dump(contents)
    if len(text) > MAX_BYTES:
        profiles = [{**profile, "sketches": None} for profile in contents["profiles"]]
        text = _dump({**contents, "profiles": profiles})
    return text.encode("ascii")


def flight_files(run: str | os.PathLike[str]) -> list[Path]:
    """Flight files in a log directory, by their steps."""
    found = {path: path.stem.partition("-")[2] for path in Path(run).glob("flight-*.json")}
    return sorted((p for p, step in found.items() if step.isdigit()), key=lambda p: int(found[p]))


def read_flight(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What :mod:`telemetry.flight.document` describes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is no flight file, or one of a version that is not known here.
    """
    contents = json.loads(Path(path).read_bytes())
    found = contents.get("format") if isinstance(contents, dict) else None
    if found != FORMAT:
        raise ValueError(f"{os.fspath(path)}: its format is {found!r}, not {FORMAT!r}")
    return dict(contents)


def _dump(contents: Mapping[str, Any]) -> str:
    return json.dumps(contents, allow_nan=False, separators=(",", ":"))

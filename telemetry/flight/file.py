"""Flight files: what is in them as bytes, where they are, and back."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from telemetry.flight.document import FORMAT
from telemetry.untrusted import fields, name, read_json_file

_NAME = re.compile(r"flight-([0-9]+)\.json")

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
    """Flight files in a log directory, in the order of their steps."""
    found = {path: _NAME.fullmatch(path.name) for path in Path(run).glob("flight-*.json")}
    steps = {path: int(parts[1]) for path, parts in found.items() if parts}
    return sorted(steps, key=lambda path: steps[path])


def read_flight(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents that :mod:`telemetry.flight.document` describes.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a flight file, or of an unknown version.
    """
    try:
        contents = read_json_file(path)
        found = fields(format=name)(contents)["format"]
    except ValueError as error:
        raise ValueError(
            f"{os.fspath(path)}: not a flight file: {error}; give a flight-<step>.json, "
            "or the directory of a run"
        ) from None
    if found != FORMAT:
        raise ValueError(f"{os.fspath(path)}: has the format {found[:100]!r}, not {FORMAT!r}")
    return dict(contents)


def _dump(contents: Mapping[str, Any]) -> str:
    return json.dumps(contents, allow_nan=False, separators=(",", ":"))

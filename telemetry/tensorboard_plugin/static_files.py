"""The page's own files: read once and served by name, so that no path leads outside of them."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import PurePath

from telemetry import palette

CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}
"""By the ending of a file's name."""


def read_static_files() -> dict[str, bytes]:
    """Name and content of every module and style sheet."""
    folder = files("telemetry.tensorboard_plugin") / "static"
    found = {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if PurePath(entry.name).suffix in CONTENT_TYPES
    }
    return {**found, "colors.js": _colors()}


def _colors() -> bytes:
    """A module with the constants of :mod:`telemetry.palette`."""
    constants = {name: value for name, value in vars(palette).items() if name.isupper()}
    lines = [f"export const {name} = {json.dumps(value)};" for name, value in constants.items()]
    return "\n".join(lines).encode()

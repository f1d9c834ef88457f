"""The page's own files: read once and served by name, so that no path leads outside of them."""

from __future__ import annotations

import json
from importlib.resources import files

from telemetry import palette

CONTENT_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
}


def read_static_files() -> dict[str, bytes]:
    """Name and content of every module and style sheet."""
    folder = files("telemetry.tensorboard_plugin") / "static"
    found = {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if content_type(entry.name) is not None
    }
    return {**found, "colors.js": _colors()}


def _colors() -> bytes:
    """A module with the constants of :mod:`telemetry.palette`."""
    constants = {name: value for name, value in vars(palette).items() if name.isupper()}
    lines = [f"export const {name} = {json.dumps(value)};" for name, value in constants.items()]
    return "\n".join(lines).encode()


def content_type(name: str) -> str | None:
    """The content type for a file name; None if the page has no such files."""
    return next((kind for ending, kind in CONTENT_TYPES.items() if name.endswith(ending)), None)

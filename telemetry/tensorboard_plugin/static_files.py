"""The page's own files: read once, served by name, so no path can lead elsewhere."""

from __future__ import annotations

from importlib.resources import files

CONTENT_TYPES = {
    ".js": "text/javascript",
    ".css": "text/css",
}


def read_static_files() -> dict[str, bytes]:
    """Name and content of every module and style sheet."""
    folder = files("telemetry.tensorboard_plugin") / "static"
    return {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if content_type(entry.name) is not None
    }


def content_type(name: str) -> str | None:
    """Of a file, by its name; None if it is none of the page's."""
    return next((kind for ending, kind in CONTENT_TYPES.items() if name.endswith(ending)), None)

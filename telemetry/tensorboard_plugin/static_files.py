"""The page's files, read once and served by name, so that no path leads outside of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import PurePath

from telemetry.layers.heat_map import INFINITE_COLORS, NAN_COLORS, VIRIDIS, ZERO_COLOR

# By the ending of a file's name.
CONTENT_TYPES = {".js": "text/javascript", ".css": "text/css"}
_IMPORT = re.compile(r'^import (\{[^}]*\}) from "\./(\w+\.js)";', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|class|const) (\w+))", re.MULTILINE)


def read_static_files() -> dict[str, bytes]:
    """Return name and content of every module and style sheet."""
    folder = files("telemetry.tensorboard_plugin") / "static"
    found = {
        entry.name: entry.read_bytes()
        for entry in folder.iterdir()
        if PurePath(entry.name).suffix in CONTENT_TYPES
    }
    return {**found, "colors.js": _colors()}


def bundle(files: Mapping[str, bytes], entry: str) -> str:
    """Return one module with the exports of ``entry`` and all its imports, for a single request.

    Each module becomes a function's result, so that equal names in two modules stay apart.
    """
    made: dict[str, str] = {}

    def add(name: str) -> str:
        code = files[name].decode()
        for _, needed in _IMPORT.findall(code):
            if needed not in made:
                add(needed)
        exports = ", ".join(exported for _, exported in _EXPORT.findall(code))
        code = _EXPORT.sub(r"\1", _IMPORT.sub(_as_constants, code))
        made[name] = f"const {_variable(name)} = (() => {{\n{code}\nreturn {{ {exports} }};\n}})();"
        return exports

    exports = add(entry)
    return "\n".join([*made.values(), f"export const {{ {exports} }} = {_variable(entry)};"])


def _as_constants(found: re.Match[str]) -> str:
    return f"const {found[1].replace(' as ', ': ')} = {_variable(found[2])};"


def _variable(name: str) -> str:
    return "$" + name.removesuffix(".js")


def _colors() -> bytes:
    constants = {
        "VIRIDIS": VIRIDIS,
        "NAN_COLORS": NAN_COLORS,
        "INFINITE_COLORS": INFINITE_COLORS,
        "ZERO_COLOR": ZERO_COLOR,
    }
    lines = [f"export const {name} = {json.dumps(value)};" for name, value in constants.items()]
    return "\n".join(lines).encode()

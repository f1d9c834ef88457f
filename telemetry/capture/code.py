"""Where in the code the modules of a model are written."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Mapping
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn

from telemetry.records import CodeLocation
from telemetry.torch_private.ranks import written_class

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\](.+)", re.DOTALL)
_MOST_WRAPPERS = 20
_NEVER_WRITTEN = nn.Module.forward.__code__  # as of containers


def places_in_code(
    modules: Mapping[str, nn.Module],
) -> dict[str, tuple[str, CodeLocation | None]]:
    """``forward`` and ``user_code`` of each :class:`telemetry.records.Module`, outer ones first."""
    found: dict[str, tuple[str, CodeLocation | None]] = {}
    for name, module in modules.items():
        code = _code_of(module)
        file, is_own = ("", False) if code is None else _file(code.co_filename)
        line = 0 if code is None else code.co_firstlineno
        _, user_code = found.get(name.rpartition(".")[0], ("", None))
        if is_own:
            class_name = written_class(module).__name__
            user_code = CodeLocation(file=file, line=line, class_name=class_name)
        found[name] = f"{file}:{line}" if file else "", user_code
    return found


def _code_of(module: nn.Module) -> CodeType | None:
    """The code of ``forward`` inside of its wrappers; None if it is not written in Python."""
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    for _ in repeat(None, _MOST_WRAPPERS):
        # Whatever it is, no code of it runs here.
        inner = inspect.getattr_static(forward, "__wrapped__", None)
        if inner is None and isinstance(forward, MethodType):
            inner = forward.__func__
        if inner is None and isinstance(forward, partial):
            inner = forward.func
        if inner is None:
            break
        forward = inner
    code = forward.__code__ if isinstance(forward, FunctionType) else None
    return None if code is _NEVER_WRITTEN else code


@cache
def _file(name: str) -> tuple[str, bool]:
    """How a file is called, and whether it is the user's own; empty if there is none."""
    try:
        path, here = Path(name).absolute(), Path.cwd()
        if not path.is_file():
            return "", False
    except (OSError, ValueError):  # the working directory is gone, or no name of a file
        return "", False
    if (installed := _INSTALLED.fullmatch(str(path))) is not None:
        return installed[1].replace(os.sep, "/"), False
    packages = Path(torch.__file__).parents[1]  # where PyTorch was built from source
    if path.is_relative_to(packages / "torch"):
        return path.relative_to(packages).as_posix(), False
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix(), True

"""Layouts: the modules and parameters of a model, and where in the code its modules are written."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Collection, Iterable, Mapping
from functools import cache, partial
from itertools import repeat
from pathlib import Path
from types import CodeType, FunctionType, MethodType

import torch
from torch import nn

from telemetry.capture.context import Context
from telemetry.records import CodeLocation, Layout, Module, Parameter
from telemetry.selection import cleaned
from telemetry.torch_private.ranks import written_class

_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\](.+)", re.DOTALL)
_MOST_WRAPPERS = 20
_NEVER_WRITTEN = nn.Module.forward.__code__  # the code of containers


class Layouts:
    """Layout of a model, computed again when the model has changed.

    Attributes:
        forward_order: Names of the modules that have run, by their first calls.
    """

    def __init__(self, context: Context) -> None:
        self.forward_order: dict[str, None] = {}
        self._context = context
        self._any_gone = True
        self._layout = Layout(modules=(), parameters=())
        self._function = ""

    def layout(
        self,
        ran: Collection[str] = (),
        parameters: tuple[Parameter, ...] = (),
        function: str = "",
    ) -> Layout:
        """Return the same layout until parameters are replaced or a module runs for the first time.

        Args:
            ran: Modules in the order in which they ran. One that never did follows the module
                before it in ``named_modules()``.
            parameters: Those of the step, if they may not be the current ones.
            function: Type of the model itself, if its output is that of a function.
        """
        parameters = parameters or self._context.table.parameters
        new = [name for name in ran if name not in self.forward_order] if ran else ()
        is_new = function not in ("", self._function)
        self._function = function or self._function
        if new or is_new or self._any_gone or self._layout.parameters is not parameters:
            model = self._context.model()
            if model is not None:
                self.forward_order.update(dict.fromkeys(new))
                self._layout = self._make_layout(model, parameters, ran)
        return self._layout

    def load_forward_order(self, order: Iterable[str]) -> None:
        """Restore the order from an earlier part of the run."""
        model = self._context.model()
        if model is not None:
            known = cleaned(model.named_modules())
            self.forward_order = dict.fromkeys(name for name in order if name in known)
            self._any_gone = True

    def _make_layout(
        self, model: nn.Module, parameters: tuple[Parameter, ...], ran: Collection[str]
    ) -> Layout:
        modules_by_name = cleaned(model.named_modules())
        modules = {name: type(module).__name__ for name, module in modules_by_name.items()}
        if self._function:
            modules[""] = self._function
        places = places_in_code(modules_by_name)
        shown = set(cleaned(self._context.selection.apply(model).items()))
        recorded = shown.union(ran, (p.module_name for p in parameters if p.recorded))
        # Tensors of modules that were removed since belong to the step.
        used = [*ran, *(parameter.module_name for parameter in parameters)]
        self._any_gone = not modules.keys() >= set(used)
        modules.update((name, "") for name in used if name not in modules)
        shown.update(used)
        depth = {name: index for index, name in enumerate(self.forward_order)}
        last = -1
        for name in modules:
            last = depth.setdefault(name, last)
        described = []
        for name in sorted((n for n in modules if n in shown), key=depth.__getitem__):
            forward, user_code = places.get(name, ("", None))
            described.append(
                Module(
                    name=name,
                    type_name=modules[name],
                    forward=forward,
                    user_code=user_code,
                    recorded=name in recorded,
                )
            )
        return Layout(modules=tuple(described), parameters=parameters)


# --- source locations -----------------------------------------------------------------------------


def places_in_code(
    modules: Mapping[str, nn.Module],
) -> dict[str, tuple[str, CodeLocation | None]]:
    """Return ``forward`` and ``user_code`` of modules, given in the order of ``named_modules()``.

    See :class:`telemetry.records.Module`.
    """
    places: dict[str, tuple[str, CodeLocation | None]] = {}
    for name, module in modules.items():
        code = _code_of(module)
        file, is_own = ("", False) if code is None else _file(code.co_filename)
        line = 0 if code is None else code.co_firstlineno
        _, user_code = places.get(name.rpartition(".")[0], ("", None))
        if is_own:
            class_name = written_class(module).__name__
            user_code = CodeLocation(file=file, line=line, class_name=class_name)
        places[name] = f"{file}:{line}" if file else "", user_code
    return places


def _code_of(module: nn.Module) -> CodeType | None:
    """Return the code of ``forward`` inside of its wrappers; None if it is not in Python."""
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    for _ in repeat(None, _MOST_WRAPPERS):
        # A static lookup runs no code of the user's.
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
    """Return the displayed path of a file, or an empty one, and whether it is the user's."""
    try:
        path, here = Path(name).absolute(), Path.cwd()
        if not path.is_file():
            return "", False
    except (OSError, ValueError):  # no working directory, or not a file name
        return "", False
    if (installed := _INSTALLED.fullmatch(str(path))) is not None:
        return installed[1].replace(os.sep, "/"), False
    packages = Path(torch.__file__).parents[1]  # where PyTorch was built from source
    if path.is_relative_to(packages / "torch"):
        return path.relative_to(packages).as_posix(), False
    return (path.relative_to(here) if path.is_relative_to(here) else path).as_posix(), True

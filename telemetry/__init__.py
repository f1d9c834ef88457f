"""See inside a PyTorch model while it trains.

``__init__.pyi`` lists the public names, for type checkers and for this file. Each is imported when
it is first used: ``import telemetry`` and the parts that only read or draw records need no torch.
"""

from __future__ import annotations

import os
import re
from importlib import import_module

with open(os.path.join(os.path.dirname(__file__), "__init__.pyi"), encoding="utf-8") as _stub:
    _MODULE_OF = {
        name: module
        for module, name in re.findall(r"^from (\S+) import (\w+) as", _stub.read(), re.MULTILINE)
    }
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(_MODULE_OF[name])
    except AttributeError as error:  # Python would report that the name does not exist
        raise ImportError(f"cannot import {_MODULE_OF[name]}: {error}", name=__name__) from error
    value: object = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

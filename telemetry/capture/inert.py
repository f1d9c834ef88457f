"""Hooks that stay behind when the model they are on is copied or saved."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any


class Inert:
    """Copies and pickles of a hook do nothing: a copied model is another model.

    They become a bound method of the standard library that takes anything and returns None, so
    that a model saved while it had hooks loads where telemetry is not installed.
    """

    __slots__ = ("__weakref__",)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")

"""Modules whose ``forward`` is a function, so that a test writes an unusual model in few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Applied(nn.Module):
    """Layers by name, and a function that applies them.

    Args:
        function: Gets this module, and what ``forward`` is called with.
    """

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | None) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *given: Any, **named: Any) -> Any:
        return self.function(self, *given, **named)

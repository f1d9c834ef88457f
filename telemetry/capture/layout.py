"""The order in which modules and parameters are shown."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from telemetry.capture.parameters import ParameterTable
from telemetry.records import Layout, Module
from telemetry.selection import Selection, cleaned


class LayoutKeeper:
    """Keeps one :class:`Layout` until parameters are replaced or a module runs for the first time.

    The forward order is that of first calls. A module that never ran follows the module before it
    in ``named_modules()``. The model is held weakly.
    """

    def __init__(self, model: nn.Module, selection: Selection, table: ParameterTable) -> None:
        self._model = weakref.ref(model)
        self._selection = selection
        self._table = table
        self._forward_order: dict[str, None] = {}
        self._layout = self._make(model)

    def current(self, ran: Iterable[str] = ()) -> Layout:
        """The layout after modules ``ran``, in that order."""
        new = [name for name in ran if name not in self._forward_order]
        if new or self._layout.parameters is not self._table.parameters:
            model = self._model()
            if model is not None:
                self._forward_order.update(dict.fromkeys(new))
                self._layout = self._make(model)
        return self._layout

    def _make(self, model: nn.Module) -> Layout:
        modules = cleaned(model.named_modules())
        shown = set(cleaned(self._selection.apply(model).items()))
        shown |= {parameter.module_name for parameter in self._table.parameters}
        rank = {name: index for index, name in enumerate(self._forward_order)}
        ranked: list[tuple[int, str]] = []
        last = -1
        for name in modules:
            last = rank.get(name, last)
            if name in shown:
                ranked.append((last, name))
        ranked.sort(key=lambda pair: pair[0])
        return Layout(
            modules=tuple(
                Module(name=name, type_name=type(modules[name]).__name__) for _, name in ranked
            ),
            parameters=self._table.parameters,
        )

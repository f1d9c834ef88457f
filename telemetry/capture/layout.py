"""The order in which modules and parameters are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from telemetry.capture.parameters import ParameterTable
from telemetry.records import Layout, Module
from telemetry.selection import Selection, cleaned


class LayoutKeeper:
    """Keeps one :class:`Layout` until parameters are replaced or a module runs for the first time.

    The forward order is that of first calls. A module that never ran follows the module before it
    in ``named_modules()``.
    """

    def __init__(self, model: nn.Module, selection: Selection, table: ParameterTable) -> None:
        self._selection = selection
        self._table = table
        self._forward_order: dict[str, None] = {}
        self._layout = self._make(model)

    def current(self, model: nn.Module | None, ran: Iterable[str]) -> Layout:
        """The layout after modules ``ran``, in that order."""
        new = [name for name in ran if name not in self._forward_order]
        if model is not None and (new or self._layout.parameters is not self._table.parameters):
            self._forward_order.update(dict.fromkeys(new))
            self._layout = self._make(model)
        return self._layout

    @property
    def forward_order(self) -> Sequence[str]:
        """The modules that have run, by name."""
        return tuple(self._forward_order)

    def set_forward_order(self, model: nn.Module, order: Iterable[str]) -> None:
        """Take the order from an earlier part of the run."""
        known = cleaned(model.named_modules())
        self._forward_order = dict.fromkeys(name for name in order if name in known)
        self._layout = self._make(model)

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

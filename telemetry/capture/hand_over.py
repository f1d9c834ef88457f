"""Hands each finished step over to the background thread, with the layout of the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext

from torch import nn

from telemetry.capture.captured import CapturedStep, RunTotals
from telemetry.capture.light import LightStep
from telemetry.capture.watch import Watch
from telemetry.capture.window import Window
from telemetry.records import Layout, Module, Parameter
from telemetry.selection import cleaned
from telemetry.torch_private import undisturbed


class HandOver:
    """Makes a :class:`CapturedStep` of each window that is complete, and delivers it.

    Attributes:
        happened: Whether anything was handed over so far.
    """

    def __init__(
        self, model: nn.Module, watch: Watch, deliver: Callable[[CapturedStep | LightStep], None]
    ) -> None:
        self.happened = False
        self._watch = watch
        self._deliver = deliver
        self._totals = RunTotals()
        self._forward_order: dict[str, None] = {}
        self._layout = self._make_layout(model, watch.table.parameters)

    def __call__(self, window: Window) -> None:
        """Nothing is added to the window any more."""
        layout = self.layout(window.order, window.parameters)
        failures = self._watch.failures
        with undisturbed() if window.full else nullcontext():
            captured = CapturedStep.of(
                window, wall_time=time.time(), layout=layout, totals=self._totals, failures=failures
            )
        self._deliver(captured)
        self.happened = True

    def light(self, step: LightStep) -> None:
        """Deliver a step that one call has read."""
        self._deliver(step)
        self.happened = True

    def layout(self, ran: Collection[str] = (), parameters: tuple[Parameter, ...] = ()) -> Layout:
        """The same one until parameters are replaced or a module runs for the first time.

        The forward order is that of first calls. A module that never ran follows the module before
        it in ``named_modules()``.

        Args:
            ran: Modules that have run, in that order.
            parameters: Of the step, if they may not be those of now.
        """
        parameters = parameters or self._watch.table.parameters
        new = [name for name in ran if name not in self._forward_order] if ran else ()
        if new or self._any_gone or self._layout.parameters is not parameters:
            model = self._watch.model()
            if model is not None:
                self._forward_order.update(dict.fromkeys(new))
                self._layout = self._make_layout(model, parameters, ran)
        return self._layout

    @property
    def forward_order(self) -> Sequence[str]:
        """The modules that have run, by name."""
        return tuple(self._forward_order)

    def load_forward_order(self, order: Iterable[str]) -> None:
        """Take the order from an earlier part of the run."""
        model = self._watch.model()
        if model is not None:
            known = cleaned(model.named_modules())
            self._forward_order = dict.fromkeys(name for name in order if name in known)
            self._layout = self._make_layout(model, self._watch.table.parameters)

    def _make_layout(
        self, model: nn.Module, parameters: tuple[Parameter, ...], ran: Collection[str] = ()
    ) -> Layout:
        found = cleaned(model.named_modules())
        modules = {name: type(module).__name__ for name, module in found.items()}
        shown = set(cleaned(self._watch.selection.apply(model).items()))
        # What the step has of layers that are gone since belongs to it.
        used = [*ran, *(parameter.module_name for parameter in parameters)]
        self._any_gone = not modules.keys() >= set(used)
        modules.update((name, "") for name in used if name not in modules)
        shown.update(used)
        rank = {name: index for index, name in enumerate(self._forward_order)}
        ranked: list[tuple[int, str]] = []
        last = -1
        for name in modules:
            last = rank.get(name, last)
            if name in shown:
                ranked.append((last, name))
        ranked.sort(key=lambda pair: pair[0])
        shown_modules = (Module(name=n, type_name=modules[n]) for _, n in ranked)
        return Layout(modules=tuple(shown_modules), parameters=parameters)

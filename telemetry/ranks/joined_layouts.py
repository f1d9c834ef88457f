"""The layouts of all stages of a pipeline as one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.stage_part import StagePart
from telemetry.records import Layout, Module, Parameter

_PLACEHOLDER = "Identity"


class JoinedLayouts:
    """The layouts of all stages as one, and where each stage's names went.

    If stages have names of parameters in common, all names are preceded by ``stage0.`` and so
    forth. An ``Identity`` that stands for a module of another stage is left out.

    Args:
        layouts: With the numbers of their stages, in that order.
    """

    def __init__(self, layouts: Sequence[tuple[int, Layout]]) -> None:
        self._prefixed = _share_names(layouts)
        modules: dict[str, Module] = {}
        parameters: dict[str, Parameter] = {}
        for stage, layout in layouts:
            for module in layout.modules:
                name = self.name(stage, module.name)
                if name not in modules or modules[name].type_name == _PLACEHOLDER:
                    modules[name] = replace(module, name=name)
            for parameter in layout.parameters:
                name = self.name(stage, parameter.name)
                owner = self.name(stage, parameter.module_name)
                parameters.setdefault(name, replace(parameter, name=name, module_name=owner))
        self.layout = Layout(modules=tuple(modules.values()), parameters=tuple(parameters.values()))
        self._placeholders = {
            (stage, module.name)
            for stage, layout in layouts
            for module in layout.modules
            if module.type_name == _PLACEHOLDER
            and modules[self.name(stage, module.name)].type_name != _PLACEHOLDER
        }
        place = {name: index for index, name in enumerate(parameters)}
        self.places: list[NDArray[np.intp]] = [
            np.array([place[self.name(stage, p.name)] for p in layout.parameters], np.intp)
            for stage, layout in layouts
        ]

    def name(self, stage: int, name: str) -> str:
        """A module's or parameter's name in all stages together."""
        if not self._prefixed:
            return name
        return f"stage{stage}.{name}" if name else f"stage{stage}"

    def is_placeholder(self, stage: int, module_name: str) -> bool:
        """Whether a module of a stage stands for one of another stage."""
        return (stage, module_name) in self._placeholders

    def names(self, stages: Iterable[StagePart], field: str) -> frozenset[str]:
        """Those that a field of the stages holds."""
        return frozenset(self.name(s.stage, name) for s in stages for name in getattr(s, field))


def _share_names(layouts: Sequence[tuple[int, Layout]]) -> bool:
    """Whether two stages have parameters of the same name."""
    names: dict[int, set[str]] = {}
    for stage, layout in layouts:
        names.setdefault(stage, set()).update(p.name for p in layout.parameters)
    return len(set().union(*names.values())) < sum(map(len, names.values()))

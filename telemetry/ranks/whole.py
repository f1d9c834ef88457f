"""From what all ranks measured at a step to the record that one process would have made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.measured import ALIKE, Measured, MeasuredParameters, Row, differing
from telemetry.records import (
    Divergence,
    Layout,
    Module,
    Output,
    Parameter,
    RankFacts,
    Spread,
    StepRecord,
)
from telemetry.records.rows import Rows
from telemetry.records.sketch import Sketch, sketch_array
from telemetry.records.tensor import Tensors, figures_of

_OF_OUTPUTS = ("outputs", "output_grads")
# What is not merged, and which the first rank has like the others, by itself or by parameter.
_OF_FIRST = ("feature_maps", "filters", "input", "random_states", "fingerprints")
_OF_PARAMETERS = ("trainable", "reached", "held", "groups")
_PLACEHOLDER = "Identity"

# Clipping scales by at most 1, so a ratio of norms below this is no rounding.
_CLIPPED = 1 - 1e-3


class WholeRecords:
    """Makes records of merged parts, in the order of their steps.

    It remembers layouts and hosts, which ranks send only when they have changed.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._host_of: dict[int, str] = {}
        self._joined: dict[tuple[tuple[int, str], ...], JoinedLayouts] = {}
        self._full = self._clipped = 0

    def record(self, part: Measured, own: StepRecord | None = None) -> StepRecord | None:
        """The record of one step.

        Args:
            part: Of all ranks that are there.
            own: What the writing rank measured; what is not merged is taken from it.

        Returns:
            None if a layout is not known: the part of that rank that held it was lost.
        """
        for key, stage in part.stages.items():
            if stage.layout is not None:
                self._layouts[key] = stage.layout
        if part.hosts:
            new = {rank: host for host, ranks in part.hosts.items() for rank in ranks}
            self._host_of = self._host_of | new
        keys = tuple(sorted(part.stages))
        if any(key not in self._layouts for key in keys):
            return None
        joined = self._joined.get(keys)
        if joined is None:
            joined = JoinedLayouts([(key[0], self._layouts[key]) for key in keys])
            self._joined = {keys: joined}  # changes rarely, so only the last one is kept
        record = _record_of(part, joined)
        if len(part.ranks) == part.size and not part.phase:
            joined.layout = _resized(record)
        names: tuple[str, ...] = _OF_FIRST if own is not None else ()
        if own is not None and own.layout.parameters == joined.layout.parameters:
            names += _OF_PARAMETERS
        return replace(
            record,
            layout=joined.layout,
            clipped_fraction=self._clipped_fraction(record),
            ranks=replace(_facts(part, joined), hosts=self._host_of),
            **{name: getattr(own, name) for name in names},
        )

    def _clipped_fraction(self, record: StepRecord) -> float | None:
        before = record.total_grad_norm_before_clipping
        if before is None:
            return None
        self._full += 1
        self._clipped += record.total_grad_norm < before * _CLIPPED
        return self._clipped / self._full


def _stages_of(part: Measured) -> list[MeasuredParameters]:
    """In the order of the stages."""
    return [part.stages[key] for key in sorted(part.stages)]


def _record_of(part: Measured, joined: JoinedLayouts) -> StepRecord:
    layout, stages = joined.layout, _stages_of(part)
    count = len(layout.parameters)
    norms, present, finite = np.zeros(count), np.zeros(count, bool), np.ones(count, bool)
    before, lowest = np.full(count, np.nan), np.full(count, np.iinfo(np.int64).max)
    ratios: dict[str, float] = {}
    for stage, at in zip(stages, joined.places, strict=True):
        grads = stage.grads
        new = grads["present"] & (~present[at] | (grads.copies < lowest[at]))
        places, (of_grads, of_before) = at[new], stage.whole_norms()
        norms[places], present[places] = of_grads[new], True
        finite[places], lowest[places] = grads["finite"][new], grads.copies[new]
        before[places] = of_before[new]
        ratios |= _update_ratios(stage, [layout.parameters[index].name for index in at])
    total_before = None
    if any(stage.before.rows for stage in stages):
        total_before = float(np.linalg.norm(before[present]))
    nonfinite = joined.names(stages, "nonfinite_parameters")
    return StepRecord(
        step=part.step,
        wall_time=part.wall_time,
        layout=layout,
        grad_norms=norms,
        grad_present=present,
        grad_finite=finite,
        phase=part.phase,
        scalars=part.scalars.means(),
        full=part.full,
        total_grad_norm_before_clipping=total_before,
        nan_buffers=tuple(sorted(joined.names(stages, "nan_buffers"))),
        nonfinite_parameters=tuple(p.name for p in layout.parameters if p.name in nonfinite),
        update_ratios={p.name: ratios[p.name] for p in layout.parameters if p.name in ratios},
        **{name: getattr(part.common, name) for name in ALIKE},
        **_tensors(part, joined),
    )


def _resized(record: StepRecord) -> Layout:
    """With whole sizes of flat parameters, of which a rank knows only its shard."""
    counts = figures_of(record.weights, attrgetter("count"))
    sizes = {
        p.name: (int(counts[p.name]),)
        for p in record.layout.parameters
        if len(p.shape) == 1 and counts.get(p.name, p.size) != p.size
    }
    if not sizes:
        return record.layout
    resized = (replace(p, shape=sizes.get(p.name, p.shape)) for p in record.layout.parameters)
    return Layout(modules=record.layout.modules, parameters=tuple(resized))


def _update_ratios(stage: MeasuredParameters, names: Sequence[str]) -> dict[str, float]:
    """``||after - before|| / ||before||``: inf if zeros moved, NaN if they stayed."""
    if not stage.updates.rows:
        return {}
    sizes = stage.updates["size"]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = stage.updates["moved"] / sizes
    measured = ~np.isnan(sizes)
    return {names[i]: float(ratios[i]) for i in np.flatnonzero(measured).tolist()}


def _tensors(part: Measured, joined: JoinedLayouts) -> dict[str, Any]:
    """By kind and name what was measured, modules and parameters in the order of the layout."""
    found: dict[str, dict[Any, int]] = {}
    tensors = part.tensors.records()
    for place, row in enumerate(tensors):
        if (name := joined.name_of(row)) is not None:
            found.setdefault(row.kind, {})[name] = place
    added: list[Sketch] = []
    for stage, at in zip(_stages_of(part), joined.places, strict=True):
        for index, values in stage.added().items() if part.full else ():
            name = joined.layout.parameters[at[index]].name
            found.setdefault("grads", {})[name] = len(tensors) + len(added)
            added.append(sketch_array(values))
    rows = Rows.concatenate([tensors.rows, Rows.of(added)])
    last, position = len(joined.layout.modules), joined.layout.position
    of_kind: dict[str, Tensors[Any]] = {}
    for kind, places in found.items():
        order = list(places)
        if kind in _OF_OUTPUTS:
            order.sort(key=lambda o: (position.get(o.module_name, last), o.place))
        elif kind != "inputs":
            order.sort(key=joined.layout.parameter_position.__getitem__)
        some = rows.take(np.array([places[name] for name in order], np.intp))
        of_kind[kind] = Tensors(tuple(order), some)
    return of_kind


def _facts(part: Measured, joined: JoinedLayouts) -> RankFacts:
    rms: dict[str, dict[Output, Spread]] = {kind: {} for kind in _OF_OUTPUTS}
    for row, spread in part.tensors.table.spreads().items():
        if row.kind in rms and (output := joined.name_of(row)) is not None:
            rms[row.kind][output] = spread
    return RankFacts(
        size=part.size,
        held=part.ranks,
        measured=part.measured,
        scalars=part.scalars.spreads(),
        step_s=part.own.spreads().get("step_s"),
        activation_rms=rms["outputs"],
        activation_grad_rms=rms["output_grads"],
        diverged=tuple(
            Divergence(
                parameter=joined.layout.parameters[at[index]].name,
                rank=rank,
                other=other,
                declared=shard >= 0,
            )
            for stage, at in zip(_stages_of(part), joined.places, strict=True)
            for index, rank, other, shard in differing(stage.checks)
        ),
        nonfinite=len(part.nonfinite),
        first_nonfinite=min(part.nonfinite.items(), default=None),
        not_known=tuple(sorted(part.not_known)),
    )


class JoinedLayouts:
    """The layouts of all stages as one, and where each stage's names went.

    If stages have names of parameters in common, all names are preceded by ``stage0.`` and so
    forth. An ``Identity`` that stands for a module of another stage is left out.
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
        place = self.layout.parameter_position
        self.places: list[NDArray[np.intp]] = [
            np.array([place[self.name(stage, p.name)] for p in layout.parameters], np.intp)
            for stage, layout in layouts
        ]

    def name(self, stage: int, name: str) -> str:
        """A module's or parameter's name in all stages together."""
        if not self._prefixed:
            return name
        return f"stage{stage}.{name}" if name else f"stage{stage}"

    def name_of(self, row: Row) -> Any:
        """What a tensor is of in all stages together; None: a module stands for another stage's."""
        if row.kind == "inputs":
            return row.name
        name = self.name(row.stage, row.name)
        if row.kind not in _OF_OUTPUTS:
            return name
        return None if (row.stage, row.name) in self._placeholders else Output(name, row.place)

    def names(self, stages: Iterable[MeasuredParameters], field: str) -> frozenset[str]:
        return frozenset(self.name(s.stage, name) for s in stages for name in getattr(s, field))


def _share_names(layouts: Sequence[tuple[int, Layout]]) -> bool:
    """Whether two stages have parameters of the same name."""
    names: dict[int, set[str]] = {}
    for stage, layout in layouts:
        names.setdefault(stage, set()).update(p.name for p in layout.parameters)
    return len(set().union(*names.values())) < sum(map(len, names.values()))

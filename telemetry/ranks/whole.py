"""From what all ranks measured at a step to the record that one process would have made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import nan
from operator import attrgetter
from typing import Any

import numpy as np

from telemetry.ranks.columns import Table, merge_all
from telemetry.ranks.measured import ALIKE, Addend, Floats, Measured, MeasuredParameters, Row
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
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.sketch import sketch_array
from telemetry.records.step import OF_PARAMETERS, ClippedFraction
from telemetry.records.tensor import Tensors, figures_of

_OF_OUTPUTS = ("outputs", "output_grads")
# What is not merged, and which the first rank has like the others; so it has OF_PARAMETERS.
_OF_FIRST = ("feature_maps", "filters", "input", "random_states", "fingerprints")
_PLACEHOLDER = "Identity"


class WholeRecords:
    """Makes records of merged parts, in the order of their steps.

    It remembers layouts and hosts, which ranks send only when they have changed.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._host_of: dict[int, str] = {}
        self._joined: dict[tuple[tuple[int, str], ...], JoinedLayouts] = {}
        self._clipped_fraction = ClippedFraction()

    def record(self, part: Measured, own: StepRecord | None = None) -> StepRecord | None:
        """The record of one step; what is not merged is of the writing rank's ``own``.

        None if a layout is not known: the part of that rank that held it was lost.
        """
        self._layouts |= {k: s.layout for k, s in part.stages.items() if s.layout is not None}
        hosts = {rank: host for host, ranks in part.hosts.items() for rank in ranks}
        self._host_of = self._host_of | hosts
        keys = tuple(sorted(part.stages))
        if not self._layouts.keys() >= part.stages.keys():
            return None
        if keys not in self._joined:  # changes rarely, so only the last one is kept
            self._joined = {keys: JoinedLayouts({key: self._layouts[key] for key in keys})}
        joined = self._joined[keys]
        parameters = joined.together(part)
        record = _record_of(part, parameters, joined)
        if len(part.ranks) == part.size and not part.phase:
            joined.layout = _resized(record)
        names: tuple[str, ...] = _OF_FIRST if own is not None else ()
        if own is not None and own.layout.parameters == joined.layout.parameters:
            names += OF_PARAMETERS
        return replace(
            record,
            layout=joined.layout,
            clipped_fraction=self._clipped_fraction.after(
                record.total_grad_norm_before_clipping, record.total_grad_norm
            ),
            ranks=replace(_facts(part, parameters, joined), hosts=self._host_of),
            **{name: getattr(own, name) for name in names},
        )


class JoinedLayouts:
    """The layouts of all stages as one.

    If stages have names of parameters in common, all names are preceded by ``stage0.`` and so
    forth. An ``Identity`` that stands for a module of another stage is left out.
    """

    def __init__(self, layouts: dict[tuple[int, str], Layout]) -> None:
        of_stage: dict[int, set[str]] = {}
        for (stage, _), layout in layouts.items():
            of_stage.setdefault(stage, set()).update(p.name for p in layout.parameters)
        self._prefixed = len(set().union(*of_stage.values())) < sum(map(len, of_stage.values()))
        modules: dict[str, Module] = {}
        parameters: dict[str, Parameter] = {}
        for (stage, _), layout in layouts.items():
            for module in layout.modules:
                name = self._name(stage, module.name)
                if name not in modules or modules[name].type_name == _PLACEHOLDER:
                    modules[name] = replace(module, name=name)
            for parameter in layout.parameters:
                name = self._name(stage, parameter.name)
                owner = self._name(stage, parameter.module_name)
                parameters.setdefault(name, replace(parameter, name=name, module_name=owner))
        self.layout = Layout(modules=tuple(modules.values()), parameters=tuple(parameters.values()))
        self._stand_ins = {
            (stage, module.name)
            for (stage, _), layout in layouts.items()
            for module in layout.modules
            if module.type_name == _PLACEHOLDER
            and modules[self._name(stage, module.name)].type_name != _PLACEHOLDER
        }
        place = self.layout.parameter_position
        self._places = {
            key: tuple([place[self._name(key[0], p.name)] for p in layout.parameters])
            for key, layout in layouts.items()
        }

    def _name(self, stage: int, name: str) -> str:
        """A module's or parameter's name in all stages together."""
        return f"stage{stage}.{name}".rstrip(".") if self._prefixed else name

    def name_of(self, row: Row) -> Any:
        """What a tensor is of in all stages together; None: a module stands for another stage's."""
        if row.kind == "inputs":
            return row.name
        name = self._name(row.stage, row.name)
        if row.kind not in _OF_OUTPUTS:
            return name
        return None if (row.stage, row.name) in self._stand_ins else Output(name, row.place)

    def together(self, part: Measured) -> MeasuredParameters:
        """What is known of the parameters of all stages; the rows are those of the layout."""
        return merge_all([self._placed(stage) for _, stage in sorted(part.stages.items())])

    def _placed(self, of: MeasuredParameters) -> MeasuredParameters:
        at = self._places[of.key]
        tables = {name: getattr(of, name) for name in ("grads", "before", "updates")}
        checks = tuple([check._replace(parameter=at[check.parameter]) for check in of.checks.rows])
        return replace(
            of,
            addends={Addend(at[a.parameter], a.copy, a.size): v for a, v in of.addends.items()},
            checks=replace(of.checks, rows=checks),
            nan_buffers=frozenset(self._name(of.stage, name) for name in of.nan_buffers),
            nonfinite_parameters=frozenset(
                self._name(of.stage, name) for name in of.nonfinite_parameters
            ),
            **{name: replace(table, rows=at) for name, table in tables.items() if table.rows},
        )


def _record_of(part: Measured, of: MeasuredParameters, joined: JoinedLayouts) -> StepRecord:
    names = [parameter.name for parameter in joined.layout.parameters]
    norms, before = _whole_norms(of, len(names))
    present = of.grads.filled("present", len(names), False)
    finite = of.grads.filled("finite", len(names), True)
    moved, size = (of.updates.filled(name, len(names), nan) for name in ("moved", "size"))
    with np.errstate(divide="ignore", invalid="ignore"):  # inf if zeros moved, NaN if they stayed
        ratios = (moved / size).tolist()
    return StepRecord(
        step=part.step,
        wall_time=part.wall_time,
        layout=joined.layout,
        grad_norms=np.where(present, norms, 0.0),
        grad_present=present,
        grad_finite=finite | ~present,
        phase=part.phase,
        scalars=part.scalars.means(),
        full=bool(part.measured),
        total_grad_norm_before_clipping=(
            float(np.linalg.norm(before[present])) if of.before.rows else None
        ),
        nan_buffers=tuple(sorted(of.nan_buffers)),
        nonfinite_parameters=tuple([name for name in names if name in of.nonfinite_parameters]),
        update_ratios={names[index]: ratios[index] for index in np.flatnonzero(~np.isnan(size))},
        **dict(zip(ALIKE, part.alike[1:], strict=False)),
        **_tensors(part, of, joined),
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


def _added(of: MeasuredParameters) -> dict[int, Floats]:
    """Sums of addends, by the index of the parameter; of several copies the lowest counts."""
    lowest = {addend.parameter: addend for addend in sorted(of.addends, reverse=True)}
    return {index: of.addends[addend] for index, addend in lowest.items()}


def _whole_norms(of: MeasuredParameters, count: int) -> tuple[Floats, Floats]:
    """Norms of the whole gradients, and at the end of the backward pass; NaN if not known.

    Of the sum of addends only the norm after it is known; clipping scales all of them alike.
    """
    norms = of.grads.filled("norm", count, nan)
    before = of.before.filled("before", count, nan)
    for index, values in _added(of).items():
        whole = np.linalg.norm(values)
        before[index] = whole * (before[index] / norms[index] if norms[index] else 1.0)
        norms[index] = whole
    return norms, before


def whole_tensors(tensors: Table) -> Tensors[Row]:
    """What was measured of each tensor as a whole; units only if all ranks' are there."""
    rows = Rows.of(()) if tensors.content is None else tensors.content
    rows = rows.having(calls=tensors["calls"])
    if (missing := (rows.units == NO_VALUES).all(axis=1)).any():
        of_row = np.arange(len(rows)).repeat(rows.unit_count)
        kept = ~np.isin(of_row, of_row[missing])
        counts = np.bincount(of_row[kept], minlength=len(rows))
        rows = rows.having(rows.units[kept], unit_count=counts)
    return Tensors(tuple(tensors.rows), rows)


def _tensors(part: Measured, of: MeasuredParameters, joined: JoinedLayouts) -> dict[str, Any]:
    """By kind and name what was measured, modules and parameters in the order of the layout."""
    found: dict[str, dict[Any, int]] = {}
    tensors, layout = whole_tensors(part.tensors), joined.layout
    for place, row in enumerate(tensors):
        if (name := joined.name_of(row)) is not None:
            found.setdefault(row.kind, {})[name] = place
    added = _added(of) if part.measured else {}
    for place, index in enumerate(added, start=len(tensors)):
        found.setdefault("grads", {})[layout.parameters[index].name] = place
    rows = Rows.concatenate([tensors.rows, Rows.of([*map(sketch_array, added.values())])])
    last, position = len(layout.modules), layout.position
    of_kind: dict[str, Tensors[Any]] = {}
    for kind, places in found.items():
        order = list(places)
        if kind in _OF_OUTPUTS:
            order.sort(key=lambda o: (position.get(o.module_name, last), o.place))
        elif kind != "inputs":
            order.sort(key=layout.parameter_position.__getitem__)
        some = rows.take(np.array([places[name] for name in order], np.intp))
        of_kind[kind] = Tensors(tuple(order), some)
    return of_kind


def _facts(part: Measured, of: MeasuredParameters, joined: JoinedLayouts) -> RankFacts:
    rms: dict[str, dict[Output, Spread]] = {kind: {} for kind in _OF_OUTPUTS}
    for row, spread in part.tensors.spreads().items():
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
        diverged=differing(of.checks, joined.layout.parameters),
        same_batch=max(part.given.values(), key=len, default=frozenset()),
        nonfinite=len(part.nonfinite),
        first_nonfinite=min(part.nonfinite.items(), default=None),
        not_known=tuple(sorted(part.not_known)),
    )


def differing(checks: Table, parameters: Sequence[Parameter]) -> tuple[Divergence, ...]:
    """Those that are not equal; the sum that most ranks have is right, of several the lowest's."""
    sums_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    holders, lowest = checks["holders"].tolist(), checks["lowest"].tolist()
    for check, count, rank in zip(checks.rows, holders, lowest, strict=True):
        sums_of.setdefault((check.parameter, check.shard), []).append((-count, rank))
    found: dict[int, Divergence] = {}
    for (index, shard), sums_there in sorted(sums_of.items()):
        (_, right), *wrong = sorted(sums_there)
        if wrong:
            rank, name = min(rank for _, rank in wrong), parameters[index].name
            new = Divergence(parameter=name, rank=rank, other=right, declared=shard >= 0)
            found[index] = min(found.get(index, new), new, key=attrgetter("rank"))
    return tuple(found.values())

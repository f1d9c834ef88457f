"""Merged records: those of all ranks together, as one process would have made them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.merging import (
    MergedStep,
    merge_parameters,
    over_ranks,
    sum_addends,
)
from telemetry.ranks.partial_record import Array, Floats, Row, TensorTable
from telemetry.records import (
    AttentionHeads,
    Divergence,
    Layout,
    Module,
    Output,
    Parameter,
    RankFacts,
    StepRecord,
)
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.sketch import sketch_array
from telemetry.records.step import OF_PARAMETERS, ClippedFraction
from telemetry.records.tensor import Tensors

# Values of rank 0 that are not merged, and OF_PARAMETERS where its layout is that of all.
_OF_RANK_0 = ("feature_maps", "filters", "input", "random_states", "fingerprints")
# Values that are alike on all ranks.
_OF_LOWEST_RANK = ("learning_rates", "loss_scale", "skipped_steps", "skipped", "eval_mode")
_OF_OUTPUTS = ("outputs", "output_grads")
# A pipeline stage may have this in the place of other stages' modules.
_PLACEHOLDER = "Identity"


class MergedRecords:
    """Makes the records of merged steps, in the order of the steps.

    It keeps layouts and hosts, which ranks send only when they have changed.
    """

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._host_of: dict[int, str] = {}
        self._joined = JoinedLayouts({})
        self._clipped_fraction = ClippedFraction()

    def record(self, merged: MergedStep, own: StepRecord | None = None) -> StepRecord | None:
        """Return the record of one step; values that are not merged come from rank 0's ``own``.

        None if the step did not end, or the message with its layout was lost.
        """
        self._host_of = self._host_of | {o.rank: o.host for o in merged.parts if o.host}
        parts = [o.parameters for o in merged.parts if o.parameters is not None]
        for part in parts:
            known = self._layouts.get(part.key)
            # On some ranks not all modules have run yet.
            if part.layout and not (known and len(part.layout.modules) <= len(known.modules)):
                self._layouts[part.key] = part.layout
        keys = sorted({part.key for part in parts})
        if not keys or not self._layouts.keys() >= set(keys):
            return None
        if (layouts := {key: self._layouts[key] for key in keys}) != self._joined.layouts:
            self._joined = JoinedLayouts(layouts)
        record = _record_of(merged, self._joined)
        names: list[str] = []
        if own is not None:
            same = own.layout.parameters == record.layout.parameters
            names = [*_OF_RANK_0, *(OF_PARAMETERS if same else ())]
        return replace(
            record,
            clipped_fraction=self._clipped_fraction.after(
                record.total_grad_norm_before_clipping, record.total_grad_norm
            ),
            ranks=_facts(merged, self._joined, self._host_of),
            **{name: getattr(own, name) for name in names},
        )


class JoinedLayouts:
    """Layout of all pipeline stages together; names get their stage if stages share any."""

    def __init__(self, layouts: Mapping[tuple[int, str], Layout]) -> None:
        self.layouts = layouts
        names_of: dict[int, set[str]] = {}
        for (stage, _), layout in layouts.items():
            names_of.setdefault(stage, set()).update(p.name for p in layout.parameters)
        total = sum(map(len, names_of.values()))
        self._prefixed = len(set().union(*names_of.values())) < total
        modules: dict[str, Module] = {}
        parameters: dict[str, Parameter] = {}
        self._stage_of: dict[str, int] = {}
        for (stage, _), layout in layouts.items():
            for module in layout.modules:
                name = self.name(stage, module.name)
                if name not in modules or module.type_name != _PLACEHOLDER:
                    modules[name] = replace(module, name=name)
                    self._stage_of[name] = stage
            for parameter in layout.parameters:
                name = self.name(stage, parameter.name)
                owner = self.name(stage, parameter.module_name)
                parameters.setdefault(name, replace(parameter, name=name, module_name=owner))
        self.layout = Layout(modules=tuple(modules.values()), parameters=tuple(parameters.values()))
        at = self.layout.parameter_position
        self.positions = {
            key: np.array([at[self.name(key[0], p.name)] for p in layout.parameters], np.intp)
            for key, layout in layouts.items()
        }

    def name(self, stage: int, name: str) -> str:
        """Return the name of a module or parameter in all stages together."""
        return f"stage{stage}.{name}".rstrip(".") if self._prefixed else name

    def key_of(self, row: Row) -> Any:
        """Return the key of a tensor in the record; None: the module is another stage's."""
        if row.kind == "inputs":
            return row.name
        name = self.name(row.stage, row.name)
        if row.kind not in _OF_OUTPUTS:
            return name
        return Output(name, row.place) if self._stage_of.get(name) == row.stage else None


def _record_of(merged: MergedStep, joined: JoinedLayouts) -> StepRecord:
    ended = [(part, part.parameters) for part in merged.parts if part.parameters is not None]
    placed = [(own, joined.positions[own.key]) for _, own in ended]
    names = [parameter.name for parameter in joined.layout.parameters]
    columns, added = merge_parameters(placed, len(names)), sum_addends(placed)
    _take_sums(columns, added)
    present, ratios = columns["present"], {}
    if "moved" in columns:
        with np.errstate(divide="ignore", invalid="ignore"):  # inf if zeros moved, else NaN
            of_all = (columns["moved"] / columns["sizes"]).tolist()
        known = np.flatnonzero(~np.isnan(columns["sizes"]))
        ratios = {names[index]: of_all[index] for index in known.tolist()}
    heads: dict[str, list[AttentionHeads]] = {}
    loads: dict[str, NDArray[np.int64]] = {}
    nan_buffers: set[str] = set()
    nonfinite: set[str] = set()
    for part, own in ended:
        name_of = partial(joined.name, own.stage)
        nan_buffers.update(map(name_of, part.nan_buffers))
        nonfinite.update(map(name_of, part.nonfinite_parameters))
        for name, of_heads in part.attention.items():
            heads.setdefault(name_of(name), []).append(of_heads)
        for name, load in part.expert_loads.items():  # each rank routes tokens of its own
            loads[name_of(name)] = load + loads.get(name_of(name), 0)
    lowest = min((part for part, _ in ended), key=attrgetter("rank"))
    return StepRecord(
        step=merged.step,
        wall_time=merged.wall_time,
        layout=joined.layout,
        grad_norms=np.where(present, columns["norms"], 0.0),
        grad_present=present,
        grad_finite=columns["finite"] | ~present,
        phase=merged.phase,
        scalars=merged.scalars()[0],
        usage=merged.usage()[0],
        expert_loads=loads,
        full=bool(merged.measured),
        total_grad_norm_before_clipping=(
            float(np.linalg.norm(columns["before"][present])) if "before" in columns else None
        ),
        nan_buffers=tuple(sorted(nan_buffers)),
        nonfinite_parameters=tuple([name for name in names if name in nonfinite]),
        update_ratios=ratios,
        attention={
            name: AttentionHeads.merged(parts)
            for name, parts in heads.items()
            if name in joined.layout.position
        },
        **{name: getattr(lowest, name) for name in _OF_LOWEST_RANK},
        **_tensors(merged.tensors(), added if merged.measured else {}, joined),
    )


def _take_sums(columns: dict[str, Array], added: Mapping[int, Floats]) -> None:
    """Put the norms of summed gradients in the place of those of their addends.

    Of the sum only the norm after clipping is known; clipping scales all addends alike.
    """
    norms, before = columns["norms"], columns.get("before")
    for index, values in added.items():
        whole = float(np.linalg.norm(values))
        if before is not None:
            before[index] = whole * (before[index] / norms[index] if norms[index] else 1.0)
        norms[index] = whole


def with_whole_units(tensors: TensorTable) -> Tensors[Row]:
    """The merged tensors; units only where the table has those of all ranks."""
    rows = tensors.content
    if (missing := (rows.units == NO_VALUES).all(axis=1)).any():
        of_row = np.arange(len(rows)).repeat(rows.unit_count)
        kept = ~np.isin(of_row, of_row[missing])
        counts = np.bincount(of_row[kept], minlength=len(rows))
        rows = rows.having(rows.units[kept], unit_count=counts)
    return Tensors(tensors.rows, rows)


def _tensors(
    merged: TensorTable | None, added: Mapping[int, Floats], joined: JoinedLayouts
) -> dict[str, Any]:
    """By kind and name the measured tensors, modules and parameters in the order of the layout."""
    found: dict[str, dict[Any, int]] = {}
    tensors: Tensors[Row] = Tensors((), Rows.of(()))
    if merged is not None:
        tensors = with_whole_units(merged)
    layout = joined.layout
    for at, row in enumerate(tensors):
        if (key := joined.key_of(row)) is not None:
            found.setdefault(row.kind, {})[key] = at
    for at, index in enumerate(added, start=len(tensors)):
        found.setdefault("grads", {})[layout.parameters[index].name] = at
    rows = Rows.concatenate([tensors.rows, Rows.of([*map(sketch_array, added.values())])])
    last, position = len(layout.modules), layout.position
    of_kind: dict[str, Tensors[Any]] = {}
    for kind, places in found.items():
        order = list(places)
        if kind in _OF_OUTPUTS:
            order.sort(key=lambda o: (position.get(o.module_name, last), o.place))
        elif kind != "inputs":
            order.sort(key=layout.parameter_position.__getitem__)
        some = rows.take(np.array([places[key] for key in order], np.intp))
        of_kind[kind] = Tensors(tuple(order), some)
    return of_kind


def _facts(merged: MergedStep, joined: JoinedLayouts, hosts: Mapping[int, str]) -> RankFacts:
    rms = {joined.key_of(row): spread for row, spread in over_ranks(merged.rms)[1].items()}
    step_s = {o.rank: {"step_s": o.step_s} for o in merged.parts if o.step_s is not None}
    batches: dict[str, set[int]] = {}
    for part in sorted(merged.parts, key=attrgetter("rank")):
        if part.batch:
            batches.setdefault(part.batch, set()).add(part.rank)
    nonfinite = [(part.rank, part.nonfinite) for part in merged.parts if part.nonfinite]
    return RankFacts(
        size=max(part.size for part in merged.parts),
        held=merged.ranks,
        measured=merged.measured,
        hosts=hosts,
        scalars=merged.scalars()[1],
        usage=merged.usage()[1],
        step_s=over_ranks(step_s)[1].get("step_s"),
        activation_rms={output: spread for output, spread in rms.items() if output is not None},
        diverged=differing(_checks(merged, joined), joined.layout.parameters),
        same_batch=frozenset(max(batches.values(), key=len, default=())),
        nonfinite=len(nonfinite),
        first_nonfinite=min(nonfinite, default=None),
    )


def _checks(merged: MergedStep, joined: JoinedLayouts) -> NDArray[np.int64]:
    """Position of the parameter, shard, sum of bits and rank of each check, ``[4, checks]``."""
    found = [np.empty((4, 0), np.int64)]
    for part in merged.parts:
        if (of := part.parameters) is not None and of.checks is not None:
            indices, shards, sums = of.checks
            ranks = np.full_like(indices, part.rank)
            found.append(np.stack([joined.positions[of.key][indices], shards, sums, ranks]))
    return np.concatenate(found, axis=1)


def differing(checks: NDArray[np.int64], parameters: Sequence[Parameter]) -> tuple[Divergence, ...]:
    """Copies that differ; the sum of most ranks is right, of several the lowest rank's."""
    checks = checks[:, np.lexsort(checks[::-1])]
    changes = (np.diff(checks[:3], prepend=-1) != 0).any(axis=0)  # no index is negative
    starts = np.flatnonzero(changes)
    counts = np.diff(starts, append=checks.shape[1])
    sums_of: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (index, shard, _, rank), count in zip(checks[:, starts].T.tolist(), counts, strict=True):
        sums_of.setdefault((index, shard), []).append((-count, rank))
    found: dict[int, Divergence] = {}
    for (index, shard), sums in sums_of.items():
        (_, right), *wrong = sorted(sums)
        if wrong:
            rank, name = min(rank for _, rank in wrong), parameters[index].name
            new = Divergence(parameter=name, rank=rank, other=right, declared=shard >= 0)
            found[index] = min(found.get(index, new), new, key=attrgetter("rank"))
    return tuple(found.values())

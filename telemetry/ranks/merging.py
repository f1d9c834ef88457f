"""Merging of the ranks' records of one step into one record, as one process would make it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.rank_record import (
    OF_INPUTS,
    Array,
    Floats,
    Integers,
    RankRecord,
    TensorKey,
    TensorTable,
    read_layout,
)
from telemetry.records import (
    AttentionHeads,
    Divergence,
    Layout,
    Module,
    Output,
    Parameter,
    RankFacts,
    Spread,
    StepRecord,
)
from telemetry.records.moments import nonfinite_of, norm_of, rms_of
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.sketch import sketch_array
from telemetry.records.step import NO_LAYOUT, OF_PARAMETERS, REDUCTIONS, By
from telemetry.records.tensor import Tensors, figures_of

_OF_OUTPUTS = ("outputs", "output_grads")
# A pipeline stage may have this in the place of other stages' modules.
_PLACEHOLDER = "Identity"

NOWHERE = np.iinfo(np.int64).max
"""Number of the copy where a rank has none."""

# Tables of tensors that are merged at once: more are faster, and take more memory.
_TABLES_AT_ONCE = 8

Key = TypeVar("Key", bound=Hashable)


def by_key(reduce: Callable[[list[Any]], Any], mappings: Iterable[Mapping[Key, Any]]) -> Any:
    """Return the reduction of the values of each key."""
    values: defaultdict[Key, list[Any]] = defaultdict(list)
    for mapping in mappings:
        for key, value in mapping.items():
            values[key].append(value)
    return {key: reduce(some) for key, some in values.items()}


def _norm(values: Array, where: Array) -> Array:
    """Roots of the sums of squares; NaN where any value is NaN, also next to infinity."""
    nan = (np.isnan(values) & where).any(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(nan, np.nan, np.hypot.reduce(values, axis=0, where=where, initial=0.0))


# Of arrays ``[ranks, parameters]``, where a copy counts; and the value of a parameter without one.
_OF_COLUMNS: Mapping[By, tuple[Callable[..., Array], float]] = {
    By.NORM: (_norm, 0.0),
    By.ANY: (partial(np.logical_or.reduce, axis=0), False),
    By.ALL: (partial(np.logical_and.reduce, axis=0), True),
}
# Of the ranks' mappings by names.
_OF_NAMES: Mapping[By, Callable[[list[Any]], Any]] = {
    By.SUM: sum,
    By.HEADS: AttentionHeads.merged,
}


def merge_column(
    by: By, parts: Sequence[tuple[Array, Integers, Integers]], count: int
) -> NDArray[Any]:
    """Return a column over all ``count`` parameters; of several copies the lowest counts.

    ``parts`` are each rank's values, the numbers of their copies, and their positions.
    """
    reduce, missing = _OF_COLUMNS[by]
    values, copies = np.full((len(parts), count), missing), np.full((len(parts), count), NOWHERE)
    for row, (own, own_copies, positions) in enumerate(parts):
        values[row, positions], copies[row, positions] = own, own_copies
    counts = (copies == copies.min(axis=0, initial=NOWHERE)) & (copies < NOWHERE)
    return np.where(counts.any(axis=0), reduce(values, where=counts), missing)


def merge_tensors(tables: Sequence[TensorTable]) -> TensorTable:
    """Merge tables, in any order, into the one of a rank that had all tensors."""
    if len(tables) == 1:
        return tables[0]
    keys = tuple(dict.fromkeys([key for table in tables for key in table.keys]))
    index = {key: place for place, key in enumerate(keys)}
    places = np.array([index[key] for table in tables for key in table.keys], np.int64)
    rows = Rows.concatenate([table.rows for table in tables])
    copies = np.concatenate([table.copies for table in tables])
    lowest, calls = np.full(len(keys), NOWHERE), np.zeros(len(keys), np.int64)
    np.minimum.at(lowest, places, copies)
    counts = copies == lowest[places]
    np.maximum.at(calls, places, np.where(counts, rows.calls, 0))
    merged = rows.merged(np.where(counts, places, -1), len(keys)).having(calls=calls)
    return TensorTable(keys=keys, copies=lowest, rows=merged)


def with_whole_units(tensors: TensorTable) -> Tensors[TensorKey]:
    """The merged tensors; units only where the table has those of all ranks."""
    rows = tensors.rows
    if (missing := (rows.units == NO_VALUES).all(axis=1)).any():
        of_row = np.arange(len(rows)).repeat(rows.unit_count)
        kept = ~np.isin(of_row, of_row[missing])
        counts = np.bincount(of_row[kept], minlength=len(rows))
        rows = rows.having(rows.units[kept], unit_count=counts)
    return Tensors(tensors.keys, rows)


def over_ranks(
    of_ranks: Iterable[tuple[int, Mapping[Key, float]]],
) -> tuple[dict[Key, float], dict[Key, Spread]]:
    """Return means of values over the ranks that have them, and extremes without NaN."""
    by_rank = [{name: (value, rank) for name, value in own.items()} for rank, own in of_ranks]
    values = by_key(list, by_rank)
    means = {name: sum([value for value, _ in some]) / len(some) for name, some in values.items()}
    spreads = {}
    for name, some in values.items():
        if known := [one for one in some if not math.isnan(one[0])]:
            (low, low_rank), (high, high_rank) = min(known), max(known, key=itemgetter(0))
            spreads[name] = Spread(low=low, low_rank=low_rank, high=high, high_rank=high_rank)
    return means, spreads


class MergedStep:
    """Records of several ranks of one step or phase; their tensors are merged as they arrive."""

    def __init__(self, first: RankRecord) -> None:
        self.sequence, self.step, self.phase = first.sequence, first.record.step, first.record.phase
        self.parts: dict[int, RankRecord] = {}  # by rank, without tensors
        self.tables: list[TensorTable] = []  # their tensors, some merged
        self.rms: dict[int, dict[TensorKey, float]] = {}  # root mean squares of outputs, by rank
        self.nbytes = 0  # of the large arrays
        self.add(first)

    def add(self, part: RankRecord) -> None:
        """Add the record of another rank; ValueError: another step, or sent before."""
        step = part.record.step
        if (step, part.record.phase) != (self.step, self.phase) or part.rank in self.parts:
            raise ValueError(f"rank {part.rank} sent step {step} out of order")
        self.nbytes += part.nbytes
        self.parts[part.rank] = part if part.tensors is None else replace(part, tensors=None)
        if part.tensors is not None:
            rms = zip(part.tensors.keys, rms_of(part.tensors.rows).tolist(), strict=True)
            self.rms[part.rank] = {key: value for key, value in rms if key.kind == "outputs"}
            self.tables.append(part.tensors)
        if len(self.tables) == _TABLES_AT_ONCE:
            merged = merge_tensors(self.tables)
            self.nbytes += merged.rows.nbytes - sum([table.rows.nbytes for table in self.tables])
            self.tables = [merged]

    @property
    def measured(self) -> frozenset[int]:
        """Ranks that measured the step in full."""
        return frozenset([rank for rank, part in self.parts.items() if part.record.full])


class MergedRecords:
    """Makes the records of merged steps; keeps the layouts, which ranks send on changes."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, str], Layout] = {}  # by stage and id
        self._joined = JoinedLayouts({})

    def record(self, merged: MergedStep) -> StepRecord:
        """Return the record of a step; it has no layout if the step did not end on any rank."""
        ended = [part for part in merged.parts.values() if part.layout_id]
        for part in ended:
            if part.layout:
                self._layouts[part.key] = read_layout(part.layout)
        keys = {part.key for part in ended}
        layouts = {key: self._layouts[key] for key in keys if key in self._layouts}
        if layouts.keys() != self._joined.positions.keys():
            self._joined = JoinedLayouts(layouts)
        return _Merge(merged, self._joined).record()


class JoinedLayouts:
    """Layout of all pipeline stages together; names get their stage if stages share any."""

    def __init__(self, layouts: Mapping[tuple[int, str], Layout]) -> None:
        names = {(stage, p.name) for (stage, _), own in layouts.items() for p in own.parameters}
        self._prefixed = len({name for _, name in names}) < len(names)
        modules: dict[str, Module] = {}
        parameters: dict[str, Parameter] = {}
        self._stage_of: dict[str, int] = {}
        # On some ranks not all modules have run yet, so the longest of a stage is the first.
        order = sorted(layouts, key=lambda key: (key[0], -len(layouts[key].modules), key[1]))
        for stage, layout_id in order:
            layout = layouts[stage, layout_id]
            for module in layout.modules:
                name = self.name(stage, module.name)
                is_there = name in modules and (
                    self._stage_of[name] == stage or module.type_name == _PLACEHOLDER
                )
                if not is_there:
                    modules[name] = replace(module, name=name)
                    self._stage_of[name] = stage
            for parameter in layout.parameters:
                name = self.name(stage, parameter.name)
                owner = self.name(stage, parameter.module_name)
                parameters.setdefault(name, replace(parameter, name=name, module_name=owner))
        self.layout = Layout(modules=tuple(modules.values()), parameters=tuple(parameters.values()))
        at = self.layout.parameter_position
        self.positions = {
            key: np.array([at[self.name(key[0], p.name)] for p in layout.parameters], np.int64)
            for key, layout in layouts.items()
        }

    def name(self, stage: int, name: str) -> str:
        """Return the name of a module or parameter in all stages together."""
        return f"stage{stage}.{name}".rstrip(".") if self._prefixed else name

    def key_of(self, key: TensorKey) -> Any:
        """Return the key of a tensor in the record; None: the module is another stage's."""
        if key.kind in OF_INPUTS:
            return key.name
        name = self.name(key.stage, key.name)
        if key.kind not in _OF_OUTPUTS:
            return name
        return Output(name, key.place) if self._stage_of.get(name) == key.stage else None


class _Merge:
    """Merging of one step."""

    def __init__(self, step: MergedStep, joined: JoinedLayouts) -> None:
        self._step, self._joined = step, joined
        self._parts = [part for _, part in sorted(step.parts.items())]  # by rank
        # Those whose step ended; of the others only scalars are known.
        self._ended = [part for part in self._parts if part.key in joined.positions]
        self._at = [joined.positions[part.key] for part in self._ended]
        self._count = len(joined.layout.parameters)
        self._spreads: dict[str, Mapping[str, Spread]] = {}  # of fields that are means

    def record(self) -> StepRecord:
        """Return the merged record."""
        names = [parameter.name for parameter in self._joined.layout.parameters]
        values = {name: self._field(name, by) for name, by in REDUCTIONS.items()}
        record = StepRecord(
            step=self._step.step,
            phase=self._step.phase,
            layout=self._joined.layout if self._ended else NO_LAYOUT,
            **{name: value for name, value in values.items() if value is not None},
        )
        broken = frozenset(record.nonfinite_parameters)
        record.nonfinite_parameters = tuple([name for name in names if name in broken])
        sums = self._sum_addends(record.grad_norms, record.grad_norms_before_clipping)
        tensors = self._tensors(sums)
        if (updates := tensors.pop("updates", None)) is not None:
            record.update_ratios = _update_ratios(updates, tensors["weights"])
        for kind, some in tensors.items():
            setattr(record, kind, some)
        record.ranks = self._facts()
        return record

    def _field(self, name: str, by: By) -> Any:
        """Return the value of a field that is no tensor; None: no rank has it."""
        value_of = attrgetter(f"record.{name}")
        if by in _OF_COLUMNS:
            columns = [(value_of(part), part.grad_copies) for part in self._ended]
            placed = [(*own, at) for own, at in zip(columns, self._at, strict=True) if own[0].size]
            return merge_column(by, placed, self._count) if placed else None
        if by is By.MEAN:
            of_ranks = [(part.rank, value_of(part)) for part in self._parts]
            means, self._spreads[name] = over_ranks(of_ranks)
            return means
        if by is By.LARGEST:
            return max(map(value_of, self._parts))
        if by is By.UNION:
            named = [self._joined.name(o.stage, key) for o in self._ended for key in value_of(o)]
            return tuple(dict.fromkeys(named))
        if by in _OF_NAMES:
            mappings = [
                {self._joined.name(part.stage, key): one for key, one in value_of(part).items()}
                for part in self._ended
            ]
            return by_key(_OF_NAMES[by], mappings)
        if not self._ended or (by is By.RANK_0 and self._ended[0].rank):
            return None
        value = value_of(self._ended[0])
        # Rank 0 may have a part of the parameters.
        return None if name in OF_PARAMETERS and len(value) != self._count else value

    def _sum_addends(self, norms: Floats, before: Floats) -> dict[int, Floats]:
        """Return sums of addends by position of the parameter; the lowest copy counts.

        Their norms replace those of the addends; clipping scales all addends alike.
        """
        addends = [
            {(int(at[index]), int(part.grad_copies[index]), values.size): values}
            for part, at in zip(self._ended, self._at, strict=True)
            for index, values in part.addends
        ]
        of_copies = by_key(sum, addends)
        sums: dict[int, Floats] = {
            key[0]: of_copies[key] for key in sorted(of_copies, reverse=True)
        }
        for index, values in sums.items():
            whole = float(np.linalg.norm(values))
            if before.size:
                before[index] = whole * (before[index] / norms[index] if norms[index] else 1.0)
            norms[index] = whole
        return sums

    def _tensors(self, sums: Mapping[int, Floats]) -> dict[str, Tensors[Any]]:
        """Return the measured tensors by kind, in the order of the layout."""
        if not self._step.tables:  # as at most steps
            return {}
        layout, last = self._joined.layout, len(self._joined.layout.modules)
        tensors = with_whole_units(merge_tensors(self._step.tables))
        places: defaultdict[str, dict[Any, int]] = defaultdict(dict)
        for at, key in enumerate(tensors):
            if (name := self._joined.key_of(key)) is not None:
                places[key.kind][name] = at
        for at, index in enumerate(sums, start=len(tensors)):
            places["grads"][layout.parameters[index].name] = at
        rows = Rows.concatenate([tensors.rows, Rows.of([*map(sketch_array, sums.values())])])
        of_kind: dict[str, Tensors[Any]] = {}
        for kind, at_name in places.items():
            order = list(at_name)
            if kind in _OF_OUTPUTS:
                order.sort(key=lambda o: (layout.position.get(o.module_name, last), o.place))
            elif kind not in OF_INPUTS:
                order.sort(key=layout.parameter_position.__getitem__)
            some = rows.take(np.array([at_name[name] for name in order], np.intp))
            of_kind[kind] = Tensors(tuple(order), some)
        return of_kind

    def _facts(self) -> RankFacts:
        parts = self._parts
        rms = over_ranks(sorted(self._step.rms.items()))[1]
        named = {self._joined.key_of(key): spread for key, spread in rms.items()}
        step_s = [(o.rank, {"step_s": o.step_s}) for o in parts if o.step_s is not None]
        batches = by_key(frozenset, [{part.batch: part.rank} for part in parts if part.batch])
        nonfinite = [(part.rank, part.nonfinite) for part in parts if part.nonfinite]
        # Position of the parameter, shard, sum of bits and rank of each check.
        checks = [np.empty((4, 0), np.int64)]
        for part, at in zip(self._ended, self._at, strict=True):
            if part.checks.size:
                indices, *others = part.checks
                checks.append(np.stack([at[indices], *others, np.full_like(indices, part.rank)]))
        return RankFacts(
            size=max(part.size for part in parts),
            held=frozenset(self._step.parts),
            measured=self._step.measured,
            hosts={part.rank: part.host for part in parts if part.host},
            scalars=self._spreads["scalars"],
            usage=self._spreads["usage"],
            step_s=over_ranks(step_s)[1].get("step_s"),
            activation_rms={output: o for output, o in named.items() if output is not None},
            diverged=differing(np.hstack(checks), self._joined.layout.parameters),
            same_batch=max(batches.values(), key=len, default=frozenset()),
            nonfinite=len(nonfinite),
            first_nonfinite=nonfinite[0] if nonfinite else None,
        )


def _update_ratios(updates: Tensors[str], weights: Tensors[str]) -> dict[str, float]:
    moved = figures_of(updates, norm_of)
    sizes = figures_of(
        weights, lambda rows: np.where(nonfinite_of(rows) == 0, norm_of(rows), math.nan)
    )
    with np.errstate(divide="ignore", invalid="ignore"):  # inf if zeros moved, else NaN
        ratios = np.array([*moved.values()]) / [sizes[name] for name in moved]
    return dict(zip(moved, ratios.tolist(), strict=True))


def differing(checks: Integers, parameters: Sequence[Parameter]) -> tuple[Divergence, ...]:
    """Return the copies that differ; the sum of most ranks is right, of several the lowest rank's.

    ``checks`` are positions of parameters, shards, sums of bits, and ranks, ``[4, checks]``.
    """
    checks = checks[:, np.lexsort(checks[::-1])]
    changes = (np.diff(checks[:3], prepend=-1) != 0).any(axis=0)  # no index is negative
    starts = np.flatnonzero(changes)
    counts = np.diff(starts, append=checks.shape[1])
    firsts = zip(checks[:, starts].T.tolist(), counts, strict=True)
    sums = by_key(sorted, [{(i, shard): (-count, rank)} for (i, shard, _, rank), count in firsts])
    diverged: dict[int, Divergence] = {}
    for (index, shard), ((_, right), *wrong) in sums.items():
        if wrong:
            rank, name = min(rank for _, rank in wrong), parameters[index].name
            new = Divergence(parameter=name, rank=rank, other=right, declared=shard >= 0)
            diverged[index] = min(diverged.get(index, new), new, key=attrgetter("rank"))
    return tuple(diverged.values())

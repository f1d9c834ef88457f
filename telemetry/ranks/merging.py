"""Merging of the ranks' measurements of one step into one record, as one process would make it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.partial_record import (
    COLUMNS,
    FIGURES,
    OF_INPUTS,
    OF_RANK_0,
    VALUES,
    Array,
    Floats,
    ParameterPart,
    PartialRecord,
    Row,
    TensorTable,
    copies_of,
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
from telemetry.records.moments import rms_of
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.sketch import sketch_array
from telemetry.records.step import OF_PARAMETERS, By, ClippedFraction, reductions
from telemetry.records.tensor import Tensors

_OF_OUTPUTS = ("outputs", "output_grads")
# A pipeline stage may have this in the place of other stages' modules.
_PLACEHOLDER = "Identity"

NOWHERE = np.iinfo(np.int64).max
"""Number of the copy where a rank has none."""

# Tables of tensors that are merged at once: more are faster, and take more memory.
_TABLES_AT_ONCE = 8

Key = TypeVar("Key", bound=Hashable)
Placed: TypeAlias = tuple[ParameterPart, NDArray[np.intp]]
"""The parameters of a rank's part of the model, and their positions in the whole."""


def merge_parameters(parts: Sequence[Placed], count: int) -> dict[str, Array]:
    """Return the columns of all ``count`` parameters by name, except those no rank measured."""

    def stack(name: str, missing: Any) -> Array:
        stacked = np.full((len(some), count), missing)
        for row, (part, at) in zip(stacked, some, strict=True):
            row[at] = part.columns[name]
        return stacked

    merged: dict[str, Array] = {}
    for name, by in FIGURES.items():
        if some := [(part, at) for part, at in parts if name in part.columns]:
            reduce, missing = COLUMNS[by]
            numbers = stack(copies_of(name), NOWHERE)
            counts = (numbers == numbers.min(axis=0)) & (numbers < NOWHERE)
            values = reduce(stack(name, missing), where=counts)
            merged[name] = np.where(counts.any(axis=0), values, missing)
    return merged


def merge_tensors(tables: Sequence[TensorTable]) -> TensorTable:
    """Merge tables, in any order, into the one of a rank that had all tensors."""
    if len(tables) == 1:
        return tables[0]
    rows = tuple(dict.fromkeys([row for table in tables for row in table.rows]))
    index = {row: place for place, row in enumerate(rows)}
    places = np.array([index[row] for table in tables for row in table.rows], np.int64)
    content = Rows.concatenate([table.content for table in tables])
    copies = np.concatenate([table.copies for table in tables])
    lowest, calls = np.full(len(rows), NOWHERE), np.zeros(len(rows), np.int64)
    np.minimum.at(lowest, places, copies)
    counts = copies == lowest[places]
    np.maximum.at(calls, places, np.where(counts, content.calls, 0))
    merged = content.merged(np.where(counts, places, -1), len(rows)).having(calls=calls)
    return TensorTable(rows=rows, copies=lowest, content=merged)


def by_key(reduce: Callable[[list[Any]], Any], mappings: Iterable[Mapping[Key, Any]]) -> Any:
    """Return the reduction of the values of each key."""
    found: defaultdict[Key, list[Any]] = defaultdict(list)
    for mapping in mappings:
        for key, value in mapping.items():
            found[key].append(value)
    return {key: reduce(values) for key, values in found.items()}


# Of the ranks' values, by rank.
_REDUCE: Mapping[By, Callable[[list[Any]], Any]] = {
    By.RANK_0: itemgetter(0),
    By.LOWEST_RANK: itemgetter(0),
    By.LARGEST: max,
    By.SUM: partial(by_key, sum),
    By.UNION: lambda values: tuple(dict.fromkeys(chain.from_iterable(values))),
    By.HEADS: partial(by_key, AttentionHeads.merged),
}
_OF_NAMES = (By.SUM, By.UNION, By.HEADS)  # of modules, buffers or parameters
_MEANS = reductions(By.MEAN)


def sum_addends(columns: Mapping[str, Array], parts: Iterable[Placed]) -> dict[int, Floats]:
    """Return sums of addends by position of the parameter; of several copies the lowest counts.

    Their norms replace those of the addends in the columns; clipping scales all addends alike.
    """
    addends = [
        {(int(at[index]), int(part.columns["copies"][index]), values.size): values}
        for part, at in parts
        for index, values in part.addends
    ]
    found = by_key(sum, addends)
    sums: dict[int, Floats] = {key[0]: found[key] for key in sorted(found, reverse=True)}
    norms, before = columns["grad_norms"], columns.get("before")
    for index, values in sums.items():
        whole = float(np.linalg.norm(values))
        if before is not None:
            before[index] = whole * (before[index] / norms[index] if norms[index] else 1.0)
        norms[index] = whole
    return sums


def over_ranks(
    of_ranks: Mapping[int, Mapping[Key, float]],
) -> tuple[dict[Key, float], dict[Key, Spread]]:
    """Return means of values over the ranks that have them, and extremes without NaN."""
    ranks = sorted(of_ranks)
    names = list(dict.fromkeys([name for rank in ranks for name in of_ranks[rank]]))
    if not names:
        return {}, {}
    logged = np.array([[name in of_ranks[rank] for name in names] for rank in ranks])
    values = np.array([[of_ranks[rank].get(n, np.nan) for n in names] for rank in ranks])
    means = np.add.reduce(values, axis=0, where=logged) / logged.sum(axis=0)
    least = values.argsort(axis=0, kind="stable")[0]  # NaN comes last
    most = (-values).argsort(axis=0, kind="stable")[0]
    return dict(zip(names, means.tolist(), strict=True)), {
        name: Spread(low=float(own[a]), low_rank=ranks[a], high=float(own[b]), high_rank=ranks[b])
        for name, own, a, b in zip(names, values.T, least, most, strict=True)
        if not np.isnan(own[a])
    }


class MergedStep:
    """Measurements of several ranks at one step or phase; tensors are merged as they arrive."""

    def __init__(self, first: PartialRecord) -> None:
        self._figures: dict[str, tuple[dict[str, float], dict[str, Spread]]] = {}
        self.step, self.phase, self.sequence = first.step, first.phase, first.sequence
        self.parts: list[PartialRecord] = []  # without tensors
        self.tables: list[TensorTable] = []  # their tensors, some merged
        self.rms: dict[int, dict[Row, float]] = {}  # root mean squares of outputs, by rank
        self.nbytes = 0  # of the large arrays
        self.ranks: set[int] = set()  # whose measurements are here
        self.add(first)

    def add(self, part: PartialRecord) -> None:
        """Add the measurements of another rank; ValueError: another step, or sent before."""
        if (part.step, part.phase) != (self.step, self.phase) or part.rank in self.ranks:
            raise ValueError(f"rank {part.rank} sent step {part.step} out of order")
        self.ranks.add(part.rank)
        self.nbytes += part.nbytes
        self.parts.append(replace(part, tensors=None))
        if part.tensors is not None:
            rms = zip(part.tensors.rows, rms_of(part.tensors.content).tolist(), strict=True)
            self.rms[part.rank] = {row: value for row, value in rms if row.kind == "outputs"}
            self.tables.append(part.tensors)
        if len(self.tables) == _TABLES_AT_ONCE:
            merged = merge_tensors(self.tables)
            self.nbytes += merged.nbytes - sum(table.nbytes for table in self.tables)
            self.tables = [merged]

    @property
    def wall_time(self) -> float:
        """Time at which the last rank ended the step."""
        return max([float(part.values["wall_time"]) for part in self.parts])

    @property
    def measured(self) -> frozenset[int]:
        """Ranks that measured the step in full."""
        return frozenset([part.rank for part in self.parts if part.full])

    def figures(self, name: str) -> tuple[dict[str, float], dict[str, Spread]]:
        """Return means and spreads of a field, once the step is complete: :func:`over_ranks`."""
        if name not in self._figures:
            of_ranks = {part.rank: part.values.get(name, {}) for part in self.parts}
            self._figures[name] = over_ranks(of_ranks)
        return self._figures[name]


class MergedRecords:
    """Makes the records of merged steps; keeps the layouts, which ranks send on changes."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, str], Layout] = {}
        self._joined = JoinedLayouts({})
        self._clipped_fraction = ClippedFraction()

    def record(self, merged: MergedStep) -> StepRecord | None:
        """Return the record of a step; None without a layout."""
        parts = [part.parameters for part in merged.parts if part.parameters is not None]
        for part in parts:
            known = self._layouts.get(part.key)
            layout = read_layout(part.layout) if part.layout else None
            # On some ranks not all modules have run yet.
            if layout and not (known and len(layout.modules) <= len(known.modules)):
                self._layouts[part.key] = layout
        keys = sorted({part.key for part in parts})
        if not keys or not self._layouts.keys() >= set(keys):
            return None
        if (layouts := {key: self._layouts[key] for key in keys}) != self._joined.layouts:
            self._joined = JoinedLayouts(layouts)
        record = _record_of(merged, self._joined)
        before, norm = record.total_grad_norm_before_clipping, record.total_grad_norm
        record.clipped_fraction = self._clipped_fraction.after(before, norm)
        return record


class JoinedLayouts:
    """Layout of all pipeline stages together; names get their stage if stages share any."""

    def __init__(self, layouts: Mapping[tuple[int, str], Layout]) -> None:
        self.layouts = layouts
        names = {(stage, p.name) for (stage, _), own in layouts.items() for p in own.parameters}
        self._prefixed = len({name for _, name in names}) < len(names)
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

    def named(self, stage: int, value: Any) -> Any:
        """Return a mapping by name, or a tuple of names, with names in all stages together."""
        if not isinstance(value, Mapping):
            return tuple([self.name(stage, name) for name in value])
        return {self.name(stage, name): one for name, one in value.items()}

    def key_of(self, row: Row) -> Any:
        """Return the key of a tensor in the record; None: the module is another stage's."""
        if row.kind in OF_INPUTS:
            return row.name
        name = self.name(row.stage, row.name)
        if row.kind not in _OF_OUTPUTS:
            return name
        return Output(name, row.place) if self._stage_of.get(name) == row.stage else None


def _record_of(merged: MergedStep, joined: JoinedLayouts) -> StepRecord:
    ended = [(part, part.parameters) for part in merged.parts if part.parameters is not None]
    ended.sort(key=lambda one: one[0].rank)
    placed = [(own, joined.positions[own.key]) for _, own in ended]
    layout = joined.layout
    columns = merge_parameters(placed, len(layout.parameters))
    sums, present = sum_addends(columns, placed), columns["grad_present"]
    ratios: dict[str, float] = {}
    if "moved" in columns:
        with np.errstate(divide="ignore", invalid="ignore"):  # inf if zeros moved, else NaN
            of_all = (columns["moved"] / columns["sizes"]).tolist()
        measured = np.flatnonzero(~np.isnan(columns["sizes"]))
        ratios = {layout.parameters[index].name: of_all[index] for index in measured.tolist()}
    values: dict[str, Any] = {name: merged.figures(name)[0] for name in _MEANS}
    for name, by in {**VALUES, **OF_RANK_0}.items():
        given = [(own.stage, part.values[name]) for part, own in ended if name in part.values]
        if given and by in _REDUCE:
            several = [joined.named(*one) if by in _OF_NAMES else one[1] for one in given]
            values[name] = _REDUCE[by](several)
    broken = frozenset(values["nonfinite_parameters"])
    values["nonfinite_parameters"] = tuple([p.name for p in layout.parameters if p.name in broken])
    known = OF_PARAMETERS[0] in values
    if known and joined.layouts[ended[0][1].key].parameters != layout.parameters:
        values = {name: value for name, value in values.items() if name not in OF_PARAMETERS}
    return StepRecord(
        step=merged.step,
        layout=layout,
        grad_norms=np.where(present, columns["grad_norms"], 0.0),
        grad_present=present,
        grad_finite=columns["grad_finite"] | ~present,
        phase=merged.phase,
        ranks=_facts(merged, joined),
        total_grad_norm_before_clipping=(
            float(np.linalg.norm(columns["before"][present])) if "before" in columns else None
        ),
        update_ratios=ratios,
        **values,
        **_tensors(merged.tables, sums if merged.measured else {}, joined),
    )


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
    tables: Sequence[TensorTable], sums: Mapping[int, Floats], joined: JoinedLayouts
) -> dict[str, Any]:
    """By kind and name the measured tensors, modules and parameters in the order of the layout."""
    layout, last = joined.layout, len(joined.layout.modules)
    tensors: Tensors[Row] = Tensors((), Rows.of(()))
    if tables:
        tensors = with_whole_units(merge_tensors(tables))
    found: defaultdict[str, dict[Any, int]] = defaultdict(dict)
    for at, row in enumerate(tensors):
        if (key := joined.key_of(row)) is not None:
            found[row.kind][key] = at
    for at, index in enumerate(sums, start=len(tensors)):
        found["grads"][layout.parameters[index].name] = at
    rows = Rows.concatenate([tensors.rows, Rows.of([*map(sketch_array, sums.values())])])
    of_kind: dict[str, Tensors[Any]] = {}
    for kind, places in found.items():
        order = list(places)
        if kind in _OF_OUTPUTS:
            order.sort(key=lambda o: (layout.position.get(o.module_name, last), o.place))
        elif kind not in OF_INPUTS:
            order.sort(key=layout.parameter_position.__getitem__)
        some = rows.take(np.array([places[key] for key in order], np.intp))
        of_kind[kind] = Tensors(tuple(order), some)
    return of_kind


def _facts(merged: MergedStep, joined: JoinedLayouts) -> RankFacts:
    parts = sorted(merged.parts, key=attrgetter("rank"))
    rms = {joined.key_of(row): spread for row, spread in over_ranks(merged.rms)[1].items()}
    step_s = {part.rank: {"step_s": part.step_s} for part in parts if part.step_s is not None}
    batches = by_key(frozenset, [{part.batch: part.rank} for part in parts if part.batch])
    # Position of the parameter, shard, sum of bits and rank of each check.
    checks = [np.empty((4, 0), np.int64)]
    for part in parts:
        if (of := part.parameters) is not None and of.checks.size:
            indices, shards, sums = of.checks
            ranks = np.full_like(indices, part.rank)
            checks.append(np.stack([joined.positions[of.key][indices], shards, sums, ranks]))
    nonfinite = [(part.rank, part.nonfinite) for part in parts if part.nonfinite]
    return RankFacts(
        size=max(part.size for part in parts),
        held=frozenset(merged.ranks),
        measured=merged.measured,
        hosts={part.rank: part.host for part in parts if part.host},
        scalars=merged.figures("scalars")[1],
        usage=merged.figures("usage")[1],
        step_s=over_ranks(step_s)[1].get("step_s"),
        activation_rms={output: spread for output, spread in rms.items() if output is not None},
        diverged=differing(np.concatenate(checks, axis=1), joined.layout.parameters),
        same_batch=max(batches.values(), key=len, default=frozenset()),
        nonfinite=len(nonfinite),
        first_nonfinite=nonfinite[0] if nonfinite else None,
    )


def differing(checks: NDArray[np.int64], parameters: Sequence[Parameter]) -> tuple[Divergence, ...]:
    """Copies that differ; the sum of most ranks is right, of several the lowest rank's."""
    checks = checks[:, np.lexsort(checks[::-1])]
    changes = (np.diff(checks[:3], prepend=-1) != 0).any(axis=0)  # no index is negative
    starts = np.flatnonzero(changes)
    counts = np.diff(starts, append=checks.shape[1])
    firsts = zip(checks[:, starts].T.tolist(), counts, strict=True)
    sums = by_key(sorted, [{(i, shard): (-count, rank)} for (i, shard, _, rank), count in firsts])
    found: dict[int, Divergence] = {}
    for (index, shard), ((_, right), *wrong) in sums.items():
        if wrong:
            rank, name = min(rank for _, rank in wrong), parameters[index].name
            new = Divergence(parameter=name, rank=rank, other=right, declared=shard >= 0)
            found[index] = min(found.get(index, new), new, key=attrgetter("rank"))
    return tuple(found.values())

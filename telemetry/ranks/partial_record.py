"""Partial record: the measurements that one rank makes and sends of one step, merged on rank 0."""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypedDict, get_type_hints

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from telemetry.events import message_pack
from telemetry.ranks.topology import UNSPLIT, LocalShard, RankNotes, RankObserver
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.moments import nonfinite_of, norm_of
from telemetry.records.rows import COLUMNS as OF_ROWS
from telemetry.records.rows import NO_VALUES, Rows
from telemetry.records.step import By, reductions
from telemetry.records.tensor import Tensors, bad_among, figures_of
from telemetry.untrusted import MAX_INTEGER

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**20)]


OF_INPUTS = ("inputs", "channels")
"""Kinds of tensors that belong to no pipeline stage."""


class Row(NamedTuple):
    """Key of a tensor: the pipeline stage, the kind as in :class:`StepRecord`, the name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """Measured tensors; units split over ranks have a place for each rank's, to be filled in."""

    rows: tuple[Row, ...]
    copies: Integers
    content: Rows

    def __post_init__(self) -> None:
        content = self.content
        buckets, units = content.bucket_count, content.unit_count
        fits = content.columns.dtype == OF_ROWS and bool((buckets >= 0).all() & (units >= 0).all())
        fits &= len(self.rows) == len(self.copies) == len(content)
        fits &= content.buckets.shape == content.counts.shape == (buckets.sum(),)
        if not fits or content.units.shape != (units.sum(), 2):
            raise ValueError("columns of tensors have different lengths")

    @staticmethod
    def of(shards: Mapping[Row, LocalShard], rows: Rows) -> TensorTable:
        """Return the tensors of one rank, in the order of ``rows``, and its shards of them."""
        pieces = np.array([shard.pieces for shard in shards.values()], np.int64)
        if (pieces > 1).any():
            units = [rows.units[:0]]
            for row, shard in enumerate(shards.values()):
                if (found := rows.units_of(row)) is not None:
                    whole = np.tile(NO_VALUES, (shard.pieces, len(found), 1))
                    whole[shard.piece] = found
                    units.append(whole.reshape(-1, 2))
            rows = rows.having(np.concatenate(units), unit_count=rows.unit_count * pieces)
        copies = np.array([shard.copy for shard in shards.values()], np.int64)
        return TensorTable(rows=tuple(shards), copies=copies, content=rows)

    @property
    def nbytes(self) -> int:
        rows = self.content
        return rows.columns.nbytes + rows.buckets.nbytes + rows.counts.nbytes + rows.units.nbytes


def _norm(values: Array, where: Array) -> Array:
    """Roots of the sums of squares; NaN where any value is NaN, also next to infinity."""
    nan = (np.isnan(values) & where).any(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(nan, np.nan, np.hypot.reduce(values, axis=0, where=where, initial=0.0))


# Columns of :class:`ParameterPart`: the reduction of ``[parts, parameters]`` that count to
# ``[parameters]``; and the value of a parameter that no rank has, of the dtype of the column.
COLUMNS: Mapping[By, tuple[Callable[..., Array], float]] = {
    By.NORM: (_norm, np.nan),
    By.ANY: (partial(np.logical_or.reduce, axis=0), False),
    By.ALL: (partial(np.logical_and.reduce, axis=0), True),
}
GRADS = reductions(*COLUMNS)
# Norms at the end of the backward pass, of the step's update, and of the parameter before the step.
FIGURES: Mapping[str, By] = {**GRADS, "before": By.NORM, "moved": By.NORM, "sizes": By.NORM}


def copies_of(name: str) -> str:
    """Return the column with the numbers of copies; of several copies only the lowest counts."""
    return "parameter_copies" if name in ("moved", "sizes") else "copies"


class Addend(NamedTuple):
    """One rank's addend of a gradient that is a sum; equal copies of equal size add up."""

    parameter: int  # index
    values: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPart:
    """Parameters of one rank's part of the model."""

    stage: int  # of a pipeline; 0 without one
    layout_id: str  # equal where the names of the parameters are
    layout: bytes  # see :func:`read_layout`; empty where it was sent before
    # FIGURES that are known, in the order of the parameters, and their copies.
    columns: Mapping[str, Array]
    # Gradients that are sums of the ranks' addends; the norms are those of the addends.
    addends: tuple[Addend, ...] = ()
    # Sums of bits, equal where shards are: index of the parameter, shard, sum ``[3, checks]``.
    checks: Integers = field(default_factory=lambda: np.empty((3, 0), np.int64))

    def __post_init__(self) -> None:
        shape = (len(self.columns["copies"]),)
        fits = self.columns.keys() >= GRADS.keys()
        for name, column in self.columns.items():
            missing = COLUMNS[FIGURES[name]][1] if name in FIGURES else 0  # a number of the copy
            fits &= column.shape == shape and column.dtype == np.dtype(type(missing))
            fits &= name not in FIGURES or copies_of(name) in self.columns
        fits &= self.checks.ndim == 2 and len(self.checks) == 3
        fits &= not self.layout or (len(read_layout(self.layout).parameters),) == shape
        indices = self.checks[:1].ravel().tolist() + [o.parameter for o in self.addends]
        if not fits or not all(0 <= index < shape[0] for index in indices):
            raise ValueError("columns of parameters have different lengths")

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id


# Version of the messages; ranks with different ones do not connect.
FORMAT = "23"


def decode(kind: Any, data: bytes) -> Any:
    """Return the value of this type that another rank encoded; else ValueError."""
    try:
        return message_pack.decode(kind, data)
    except ValueError as error:
        raise ValueError(f"a message of another rank is damaged: {error}") from None


@lru_cache
def read_layout(data: bytes) -> Layout:
    """Return a layout inside a message; ranks send the same ones again and again."""
    layout: Layout = message_pack.decode(Layout, data)
    return layout


# Fields of a record that ranks send as they are, and their reductions.
VALUES = reductions(By.LOWEST_RANK, By.LARGEST, By.UNION, By.MEAN, By.SUM, By.HEADS)
OF_RANK_0 = reductions(By.RANK_0)
if TYPE_CHECKING:
    Values: TypeAlias = Mapping[str, Any]
else:
    _kinds = get_type_hints(StepRecord)
    Values = TypedDict("Values", {name: _kinds[name] for name in VALUES}, total=False)


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialRecord:
    """Measurements of one rank at one step."""

    rank: Rank
    size: Rank  # number of ranks that train together
    step: Natural
    phase: str = ""
    sequence: Natural = 0  # sequence number of the step or phase: see PartMaker.numbered
    # VALUES of the record; of rank 0, which does not send its own, also OF_RANK_0.
    values: Values
    parameters: ParameterPart | None = None  # None: the step did not end
    tensors: TensorTable | None = None
    batches: tuple[Batch, ...] = ()  # since the last one, by the user's ids
    step_s: float | None = None  # seconds from the step before
    host: str = ""
    # Digest of the batch, with the group of ranks that should have different ones; or empty.
    batch: str = ""
    nonfinite: str = ""  # first NaN or infinity that this rank did not receive from others

    @property
    def full(self) -> bool:
        return bool(self.values.get("full"))

    @property
    def nbytes(self) -> int:
        """Bytes of the large arrays."""
        values = [*self.values.values()]
        values += chain.from_iterable(o.values() for o in values if isinstance(o, Mapping))
        values += [] if self.parameters is None else [self.parameters.columns["grad_norms"]]
        values += [] if self.tensors is None else [self.tensors]
        return sum(o.nbytes for o in values if isinstance(o, np.ndarray | TensorTable))


# --- of this rank's records ----------------------------------------------------------------------

# A step's sequence number is the last of its block; the others are of phases before it. The next
# epoch begins when a run goes back to an earlier step.
PER_STEP = 2**10
EPOCH = PER_STEP * 2**34


class PartMaker:
    """Makes the partial records of one rank, in the order of its steps; on the worker thread."""

    def __init__(self, ranks: RankObserver) -> None:
        self._ranks = ranks
        self._host = socket.gethostname()
        self._layout: Layout | None = None  # sent before
        self._layout_id, self._layout_data = "", b""
        self._last: tuple[int, float] | None = None
        self._epoch, self._sequence = 0, -1

    def part(self, record: StepRecord, notes: RankNotes) -> PartialRecord:
        """Return the partial record of a step."""
        ranks, step_s = self._ranks, None
        if not record.phase:
            last, self._last = self._last, (record.step, record.wall_time)
            if last is not None and last[0] == record.step - 1:
                step_s = record.wall_time - last[1]
        has_batch = ranks.data_group is not None and record.fingerprints
        whole = ranks.rank == 0 and (record.full or record.phase)
        names = [*VALUES, *OF_RANK_0] if whole else VALUES
        return PartialRecord(
            rank=ranks.rank,
            size=ranks.size,
            step=record.step,
            phase=record.phase,
            values={name: getattr(record, name) for name in names},
            parameters=self._parameters(record, notes),
            tensors=_tensors(record, notes, ranks),
            step_s=step_s,
            host=self._host,
            batch=f"{ranks.data_group}/{record.fingerprints}" if has_batch else "",
            nonfinite="" if ranks.shares_data else _nonfinite(record),
        )

    def logged(self, step: int, scalars: Mapping[str, float]) -> PartialRecord:
        """Return the partial record of a step that did not end: its logged scalars."""
        values = {"wall_time": time.time(), "scalars": scalars}
        return PartialRecord(rank=self._ranks.rank, size=self._ranks.size, step=step, values=values)

    def numbered(self, part: PartialRecord) -> PartialRecord:
        last_of_step = self._epoch + (part.step + 1) * PER_STEP - 1
        if last_of_step <= self._sequence:  # the run goes back to an earlier step
            self._epoch += EPOCH
            last_of_step += EPOCH
        first_of_step = last_of_step - PER_STEP + 1
        self._sequence = max(first_of_step, self._sequence + 1) if part.phase else last_of_step
        return replace(part, sequence=self._sequence)

    def _parameters(self, record: StepRecord, notes: RankNotes) -> ParameterPart:
        layout, ranks = record.layout, self._ranks
        if is_new := layout is not self._layout:
            names = "\n".join(parameter.name for parameter in layout.parameters)
            self._layout_id = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
            self._layout, self._layout_data = layout, message_pack.encode(layout)
        columns: dict[str, Array] = {
            "copies": ranks.copies(len(layout.parameters), notes.grads),
            **{name: getattr(record, name) for name in GRADS},
        }
        # The schedule of a pipeline divides gradients by the number of micro-batches later.
        if notes.before_clipping is not None and not ranks.is_in_pipeline:
            columns["before"] = notes.before_clipping
        if record.full:
            columns["parameter_copies"] = ranks.copies(len(layout.parameters), notes.parameters)
            columns["moved"], columns["sizes"] = _updates(notes, record)
        checks = [
            (index, notes.parameters[index].shard, total)
            for indices, totals in notes.bit_sums
            for index, total in zip(indices, totals.wait().tolist(), strict=True)
        ]
        return ParameterPart(
            stage=ranks.stage,
            layout_id=self._layout_id,
            layout=self._layout_data if record.full or record.phase or is_new else b"",
            columns=columns,
            addends=tuple(_addends(record, notes)),
            checks=np.array(checks, np.int64).reshape(-1, 3).T,
        )


def _nonfinite(record: StepRecord) -> str:
    """Return the first NaN or infinity, or an empty string."""
    found = [f"the parameter {name}" for name in record.nonfinite_parameters]
    found += [f"the output of {output}" for output in bad_among(record.outputs)]
    found += ["the loss"] * (record.loss is not None and not math.isfinite(record.loss))
    return next(iter(found), "")


def _tensors(record: StepRecord, notes: RankNotes, ranks: RankObserver) -> TensorTable | None:
    shards_of: dict[str, Mapping[Any, LocalShard]] = {
        "inputs": notes.outputs,
        "channels": notes.outputs,
        "outputs": notes.outputs,
        "output_grads": notes.output_grads,
        "grads": notes.grads,
        "weights": notes.parameters,
        "second_moments": notes.parameters,
    }
    found: dict[Row, LocalShard] = {}
    for kind, shards in shards_of.items():
        for name in getattr(record, kind):
            if kind in OF_INPUTS:
                found[Row(0, kind, name)] = shards.get("" if kind == "channels" else name, UNSPLIT)
            elif isinstance(name, Output):
                found[Row(ranks.stage, kind, *name)] = shards.get(name, UNSPLIT)
            else:
                index = record.layout.parameter_position[name]
                found[Row(ranks.stage, kind, name)] = shards.get(index) or ranks.of_plain(index)
    rows = [Tensors.of(getattr(record, kind)).rows for kind in shards_of if found]
    return TensorTable.of(found, Rows.concatenate(rows)) if found else None


def _updates(notes: RankNotes, record: StepRecord) -> tuple[Floats, Floats]:
    """Return the norms of parameters' updates, and of the parameters before; NaN: not measured.

    The update of a large parameter is its norm times the ratio of a sample, if that is known.
    """
    layout = record.layout
    moved, sizes = np.full((2, len(layout.parameters)), np.nan)
    norms = figures_of(
        record.weights, lambda rows: np.where(nonfinite_of(rows) == 0, norm_of(rows), math.nan)
    )
    for index, moved_norm, _, ratio in notes.moved:
        if (size := norms.get(layout.parameters[index].name)) is not None:
            sizes[index], moved[index] = size, ratio * size if size else moved_norm
    counts = figures_of(record.weights, attrgetter("count"))
    empty = [layout.parameter_position[name] for name, count in counts.items() if count == 0]
    moved[empty] = sizes[empty] = 0.0  # of empty shards
    return moved, sizes


def _addends(record: StepRecord, notes: RankNotes) -> Iterator[Addend]:
    """Yield this rank's addends of gradients, as the optimizer used them."""
    for index, copy in notes.addends.items():
        values = copy.wait().double().numpy().reshape(-1)
        norm, used = float(np.linalg.norm(values)), float(record.grad_norms[index])
        # Without a scaler's factor.
        factor = used / norm if norm > 0 and math.isfinite(norm) and math.isfinite(used) else 1.0
        yield Addend(index, values * factor)

"""Record of one rank at one step, and the facts about this rank that merging needs."""

from __future__ import annotations

import hashlib
import math
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from telemetry.events import message_pack
from telemetry.ranks.topology import UNSPLIT, LocalShard, RankNotes, RankObserver
from telemetry.records import Layout, Output, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.moments import norm_of
from telemetry.records.rows import COLUMNS, NO_VALUES, Rows
from telemetry.records.sketch import Sketch
from telemetry.records.step import REDUCTIONS, By
from telemetry.records.tensor import Tensors, bad_among, figures_of
from telemetry.untrusted import MAX_INTEGER

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Natural: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**20)]

# Kinds of tensors that belong to no pipeline stage.
OF_INPUTS = ("inputs", "channels")
KINDS = [name for name, by in REDUCTIONS.items() if by is By.TENSORS]

_NO_TENSORS: Mapping[str, Any] = {kind: {} for kind in KINDS}
# Fields of a record that are sent; tensors are sent as one table.
_SENT = {"step", "phase", *[n for n, by in REDUCTIONS.items() if by is not By.RANK_0]} - {*KINDS}


class TensorKey(NamedTuple):
    """Key of a tensor: the pipeline stage, the kind as in :class:`StepRecord`, the name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """Measured tensors; units split over ranks have a place for each rank's, to be filled in."""

    keys: tuple[TensorKey, ...]
    copies: Integers
    rows: Rows

    def __post_init__(self) -> None:
        rows = self.rows
        buckets, units = rows.bucket_count, rows.unit_count
        fits = rows.columns.dtype == COLUMNS and bool((buckets >= 0).all() & (units >= 0).all())
        fits &= len(self.keys) == len(self.copies) == len(rows)
        fits &= rows.buckets.shape == rows.counts.shape == (buckets.sum(),)
        if not fits or rows.units.shape != (units.sum(), 2):
            raise ValueError("columns of tensors have different lengths")

    @staticmethod
    def of(shards: Mapping[TensorKey, LocalShard], rows: Rows) -> TensorTable:
        """Return the tensors of one rank, in the order of ``rows``, and its shards of them."""
        pieces = np.array([shard.pieces for shard in shards.values()], np.int64)
        if (pieces > 1).any():
            units = [rows.units[:0]]
            for row, shard in enumerate(shards.values()):
                if (own := rows.units_of(row)) is not None:
                    whole = np.tile(NO_VALUES, (shard.pieces, len(own), 1))
                    whole[shard.piece] = own
                    units.append(whole.reshape(-1, 2))
            rows = rows.having(np.concatenate(units), unit_count=rows.unit_count * pieces)
        copies = np.array([shard.copy for shard in shards.values()], np.int64)
        return TensorTable(keys=tuple(shards), copies=copies, rows=rows)


class Addend(NamedTuple):
    """One rank's addend of a gradient that is a sum; equal copies of equal size add up."""

    parameter: int  # index
    values: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class RankRecord:
    """Record of one rank, as it is sent to rank 0; arrays over parameters are of its layout.

    Several ranks may have copies of a tensor: of several numbers of copies only the lowest counts.
    """

    rank: Rank
    size: Rank  # number of ranks that train together
    sequence: Natural = 0  # sequence number of the step or phase: see RankRecords.numbered
    record: StepRecord  # without tensors; other ranks send those fields that are merged
    tensors: TensorTable | None = None
    stage: int = 0  # of a pipeline; 0 without one
    layout_id: str = ""  # of equal layouts; empty: the step did not end
    layout: bytes = b""  # see :func:`read_layout`; empty where it was sent before
    grad_copies: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    # Gradients that are sums of the ranks' addends; the norms are those of the addends.
    addends: tuple[Addend, ...] = ()
    # Sums of bits, equal where shards are: index of the parameter, shard, sum ``[3, checks]``.
    checks: Integers = field(default_factory=lambda: np.empty((3, 0), np.int64))
    batches: tuple[Batch, ...] = ()  # since the last one, by the user's ids
    step_s: float | None = None  # seconds from the step before
    host: str = ""
    # Digest of the batch, with the group of ranks that should have different ones; or empty.
    batch: str = ""
    nonfinite: str = ""  # first NaN or infinity that this rank did not receive from others

    def __post_init__(self) -> None:
        record, shape = self.record, (len(self.grad_copies),)
        columns = [self.grad_copies, record.grad_norms, record.grad_present, record.grad_finite]
        if record.grad_norms_before_clipping.size:
            columns.append(record.grad_norms_before_clipping)
        fits = all(column.shape == shape for column in columns)
        fits &= self.checks.ndim == 2 and len(self.checks) == 3
        fits &= not self.layout or (len(read_layout(self.layout).parameters),) == shape
        indices = self.checks[0].tolist() if fits else []
        indices += [addend.parameter for addend in self.addends]
        if not fits or not all(0 <= index < shape[0] for index in indices):
            raise ValueError("columns of parameters have different lengths")

    @property
    def key(self) -> tuple[int, str]:
        """Key of its layout."""
        return self.stage, self.layout_id

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays that may be large."""
        arrays: list[Array] = [self.record.grad_norms, *self.record.feature_maps.values()]
        arrays += [addend.values for addend in self.addends]
        tensors = 0 if self.tensors is None else self.tensors.rows.nbytes
        return tensors + sum([array.nbytes for array in arrays])

    def encode(self) -> bytes:
        """Return the message of this record; :func:`decode` reads it."""
        record = {name: value for name, value in vars(self.record).items() if name in _SENT}
        own = {name: o for name, o in vars(self).items() if getattr(o, "size", 1)}  # no empty array
        return message_pack.encode({**own, "record": record})


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


# --- of this rank's records ----------------------------------------------------------------------

# A step's sequence number is the last of its block; the others are of phases before it. The next
# epoch begins when a run goes back to an earlier step.
PER_STEP = 2**10
EPOCH = PER_STEP * 2**34


class RankRecords:
    """Makes what one rank sends, in the order of its steps; on the worker thread."""

    def __init__(self, ranks: RankObserver) -> None:
        self._ranks = ranks
        self._host = socket.gethostname()
        self._layout: Layout | None = None  # sent before
        self._layout_id, self._layout_data = "", b""
        self._last: tuple[int, float] | None = None
        self._epoch, self._sequence = 0, -1

    def of(self, record: StepRecord, notes: RankNotes) -> RankRecord:
        """Return what is sent of a step."""
        ranks, step_s = self._ranks, None
        if not record.phase:
            last, self._last = self._last, (record.step, record.wall_time)
            if last is not None and last[0] == record.step - 1:
                step_s = record.wall_time - last[1]
        if is_new := record.layout is not self._layout:
            self._layout, self._layout_data = record.layout, message_pack.encode(record.layout)
            self._layout_id = hashlib.blake2b(self._layout_data, digest_size=8).hexdigest()
        checks = [
            (index, notes.parameters[index].shard, total)
            for indices, totals in notes.bit_sums
            for index, total in zip(indices, totals.wait().tolist(), strict=True)
        ]
        has_batch = ranks.data_group is not None and record.fingerprints
        tensors = _tensors(record, notes, ranks)
        return RankRecord(
            rank=ranks.rank,
            size=ranks.size,
            record=record if tensors is None else replace(record, **_NO_TENSORS),
            tensors=tensors,
            stage=ranks.stage,
            layout_id=self._layout_id,
            layout=self._layout_data if record.full or record.phase or is_new else b"",
            grad_copies=ranks.copies(len(record.layout.parameters), notes.grads),
            addends=tuple(_addends(record, notes)),
            checks=np.array(checks, np.int64).reshape(-1, 3).T,
            step_s=step_s,
            host=self._host,
            batch=f"{ranks.data_group}/{record.fingerprints}" if has_batch else "",
            nonfinite="" if ranks.shares_data else _nonfinite(record),
        )

    def logged(self, step: int, scalars: Mapping[str, float]) -> RankRecord:
        """Return what is sent of a step that did not end: its logged scalars."""
        record = StepRecord(step=step, wall_time=time.time(), scalars=scalars)
        return RankRecord(rank=self._ranks.rank, size=self._ranks.size, record=record)

    def numbered(self, sent: RankRecord) -> RankRecord:
        """Return it with the next sequence number."""
        last_of_step = self._epoch + (sent.record.step + 1) * PER_STEP - 1
        if last_of_step <= self._sequence:  # the run goes back to an earlier step
            self._epoch += EPOCH
            last_of_step += EPOCH
        next_of_step = max(last_of_step - PER_STEP, self._sequence) + 1
        self._sequence = next_of_step if sent.record.phase else last_of_step
        return replace(sent, sequence=self._sequence)


def _nonfinite(record: StepRecord) -> str:
    """Return the first NaN or infinity, or an empty string."""
    places = [f"the parameter {name}" for name in record.nonfinite_parameters]
    places += [f"the output of {output}" for output in bad_among(record.outputs)]
    places += ["the loss"] * (record.loss is not None and not math.isfinite(record.loss))
    return next(iter(places), "")


def _tensors(record: StepRecord, notes: RankNotes, ranks: RankObserver) -> TensorTable | None:
    """Return the measured tensors, and the norms of the updates as the kind ``updates``."""
    if not any(getattr(record, kind) for kind in KINDS):
        return None
    tensors = {kind: Tensors.of(getattr(record, kind)) for kind in KINDS}
    tensors["updates"] = _updates(record, notes)
    shards_of: dict[str, Mapping[Any, LocalShard]] = {
        "output_grads": notes.output_grads,
        "grads": notes.grads,
        "weights": notes.parameters,
        "second_moments": notes.parameters,
        "updates": notes.parameters,
    }
    sent: dict[TensorKey, LocalShard] = {}
    for kind, some in tensors.items():
        shards = shards_of.get(kind, notes.outputs)
        for name in some:
            if kind in OF_INPUTS:
                shard = shards.get("" if kind == "channels" else name, UNSPLIT)
                sent[TensorKey(0, kind, name)] = shard
            elif isinstance(name, Output):
                sent[TensorKey(ranks.stage, kind, *name)] = shards.get(name, UNSPLIT)
            else:
                index = record.layout.parameter_position[name]
                shard = shards.get(index) or ranks.of_plain(index)
                sent[TensorKey(ranks.stage, kind, name)] = shard
    return TensorTable.of(sent, Rows.concatenate([some.rows for some in tensors.values()]))


def _updates(record: StepRecord, notes: RankNotes) -> Tensors[str]:
    """Return the updates of parameters, of which only the sums of squares are known.

    The update of a large parameter is its norm times the ratio of a sample, if that is known.
    """
    names, norms = [p.name for p in record.layout.parameters], dict[str, float]()
    sizes = figures_of(record.weights, norm_of)
    for index, update, _, ratio in notes.moved:
        if (size := sizes.get(names[index])) is not None:
            norms[names[index]] = ratio * size if size else update
    rows = Rows.of([Sketch.empty()] * len(norms))
    return Tensors([*norms], rows.having(sum_squares=np.square([*norms.values()])))


def _addends(record: StepRecord, notes: RankNotes) -> Iterator[Addend]:
    """Yield this rank's addends of gradients, as the optimizer used them."""
    for index, copy in notes.addends.items():
        values = copy.wait().double().numpy().reshape(-1)
        norm, used = float(np.linalg.norm(values)), float(record.grad_norms[index])
        # Without a scaler's factor.
        factor = used / norm if norm > 0 and math.isfinite(norm) and math.isfinite(used) else 1.0
        yield Addend(index, values * factor)

"""Partial record: the measurements that one rank sends of one step, to be merged on rank 0.

A message is a JSON header, and raw arrays behind it. The header is checked against the types of a
class's fields; nothing else is created from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache, lru_cache, partial
from typing import Annotated, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.topology import LocalShard
from telemetry.records import AttentionHeads, Layout, StepRecord
from telemetry.records.batches import Batch
from telemetry.records.rows import COLUMNS, NO_VALUES, Rows
from telemetry.untrusted import check_of

Array: TypeAlias = NDArray[Any]
Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]


class Row(NamedTuple):
    """Key of a tensor: the pipeline stage, the kind as in :class:`StepRecord`, the name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """Measured tensors; units split over ranks have a place for each rank's, to be filled in."""

    rows: Annotated[tuple[Row, ...], _rows_in]
    copies: Integers
    content: Rows

    def __post_init__(self) -> None:
        content = self.content
        fits = content.columns.dtype == COLUMNS and content.units.shape[1:] == (2,)
        fits &= len(self.rows) == len(self.copies) == len(content)
        for sizes, array in (
            (content.unit_count, content.units),
            (content.bucket_count, content.buckets),
            (content.bucket_count, content.counts),
        ):
            fits &= sizes.sum() == len(array) and bool((sizes >= 0).all())
        if not fits:
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
        content = self.content
        arrays = (content.columns, content.buckets, content.counts, content.units)
        return sum(array.nbytes for array in arrays)


class Figure(NamedTuple):
    """Column of :class:`ParameterPart` and its reduction over ranks.

    Attributes:
        copies: Column with the numbers of copies; of several copies only the lowest counts.
        reduce: From ``[parts, parameters]`` to ``[parameters]``, of the values that count.
        missing: Value of a parameter that no rank has, of the dtype of the column.
    """

    copies: str
    reduce: Callable[..., Array]
    missing: float


def _norm(values: Array, where: Array) -> Array:
    """Roots of the sums of squares; NaN where any value is NaN, also next to infinity."""
    nan = (np.isnan(values) & where).any(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(nan, np.nan, np.hypot.reduce(values, axis=0, where=where, initial=0.0))


FIGURES: Mapping[str, Figure] = {
    # L2 norms of the gradients, and at the end of the backward pass.
    "norms": Figure("copies", _norm, np.nan),
    "before": Figure("copies", _norm, np.nan),
    "present": Figure("copies", partial(np.logical_or.reduce, axis=0), False),
    "finite": Figure("copies", partial(np.logical_and.reduce, axis=0), True),
    # L2 norms of the step's update, and of the parameter before the step; NaN: not measured.
    "moved": Figure("parameter_copies", _norm, np.nan),
    "sizes": Figure("parameter_copies", _norm, np.nan),
}


class Addend(NamedTuple):
    """One rank's addend of a gradient that is a sum; equal copies of equal size add up."""

    parameter: int  # index
    copy: int
    values: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPart:
    """Parameters of one rank's part of the model."""

    stage: int  # of a pipeline; 0 without one
    layout_id: str  # equal where the names of the parameters are
    layout: Annotated[Layout, _layout_in] | None  # None where it was sent before
    # FIGURES that are known, in the order of the parameters, and their copies.
    columns: Mapping[str, Array]
    # Gradients that are sums of the ranks' addends; the norms are those of the addends.
    addends: tuple[Addend, ...] = ()
    # Sums of bits, equal where shards are: index of the parameter, shard, sum ``[3, checks]``.
    checks: Integers | None = None

    def __post_init__(self) -> None:
        shape = (len(self.columns["norms"]),)
        fits = self.columns.keys() >= {"copies", "norms", "present", "finite"}
        for name, column in self.columns.items():
            figure = FIGURES.get(name)  # None: of copies
            dtype = np.dtype(np.int64 if figure is None else type(figure.missing))
            fits &= column.shape == shape and column.dtype == dtype
            fits &= figure is None or figure.copies in self.columns
        checks = np.empty((3, 0), np.int64) if self.checks is None else self.checks
        indices = [*checks[0].tolist(), *(addend.parameter for addend in self.addends)]
        fits &= checks.ndim == 2 and len(checks) == 3
        fits &= self.layout is None or (len(self.layout.parameters),) == shape
        if not fits or not all(0 <= index < shape[0] for index in indices):
            raise ValueError("columns of parameters have different lengths")

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialRecord:
    """Measurements of one rank at one step; :data:`COPIED` fields are those of a StepRecord."""

    rank: int
    size: int  # number of ranks that train together
    step: int
    wall_time: float
    phase: str = ""
    sequence: int = 0  # sequence number of the step or phase: see PartMaker.numbered
    full: bool = False
    parameters: ParameterPart | None = None  # None: the step did not end
    tensors: TensorTable | None = None
    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped_steps: int = 0
    skipped: bool = False
    eval_mode: bool = False
    attention: Mapping[str, AttentionHeads] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)
    expert_loads: Mapping[str, Integers] = field(default_factory=dict)
    nan_buffers: tuple[str, ...] = ()
    nonfinite_parameters: tuple[str, ...] = ()
    batches: tuple[Batch, ...] = ()  # since the last one, by the user's ids
    step_s: float | None = None  # seconds from the step before
    host: str = ""  # empty where it was sent before
    # Digest of the batch, with the group of ranks that should have different ones; or empty.
    batch: str = ""
    nonfinite: str = ""  # first NaN or infinity that this rank did not receive from others

    @property
    def nbytes(self) -> int:
        """Bytes of the large arrays."""
        norms = 0 if self.parameters is None else self.parameters.columns["norms"].nbytes
        return norms + (0 if self.tensors is None else self.tensors.nbytes)


COPIED = sorted({f.name for f in fields(PartialRecord)} & {f.name for f in fields(StepRecord)})


# --- messages ------------------------------------------------------------------------------------

# Version of the messages; ranks with different ones do not connect.
FORMAT = "20"

_SIZE_BYTES = 4
_ARRAY = {"dtype", "shape"}
_DTYPES = {np.dtype(o).str: np.dtype(o) for o in ("i8", "f8", "?", "i2", "f4", COLUMNS)}
_check = cache(check_of)


# Ranks send the same rows and layouts again and again: a text inside the header, parsed once.
@lru_cache(2048)
def _rows_in(text: str) -> tuple[Row, ...]:
    rows: tuple[Row, ...] = _check(tuple[Row, ...])(json.loads(text))
    return rows


@lru_cache(2048)
def _layout_in(text: str) -> Layout:
    layout: Layout = _check(Layout)(json.loads(text))
    return layout


def encode(value: object) -> bytes:
    """Return bytes for :func:`decode`."""
    raw: list[bytes] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            raw.append(value.tobytes())
            return {"dtype": value.dtype.str, "shape": value.shape}
        if isinstance(value, Mapping):
            return dict(value)
        found = {field.name: getattr(value, field.name) for field in fields(value)}
        if isinstance(value, TensorTable):
            found["rows"] = _dumps(value.rows)
        return _dumps(found, plain) if isinstance(value, Layout) else found

    header = _dumps(value, plain).encode()
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "big"), header, *raw])


def decode(kind: Any, data: bytes) -> Any:
    """Return the value of this type that :func:`encode` made these bytes of; else ValueError."""
    at = behind = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")

    def read_array(found: dict[str, Any]) -> Any:
        nonlocal at
        if found.keys() != _ARRAY or type(found["dtype"]) is not str:
            return found  # a mapping
        dtype, shape = _DTYPES[found["dtype"]], found["shape"]
        if any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array has a wrong shape")
        array = np.frombuffer(data, dtype, math.prod(shape), at).reshape(shape)
        at += array.nbytes
        # A small array must not keep all bytes in memory; a large one is not copied.
        return array.copy() if 4 * array.nbytes < len(data) else array

    try:
        header = json.loads(data[_SIZE_BYTES:behind], object_hook=read_array)
        value = _check(kind)(header)
        if at != len(data):
            raise ValueError("its length is wrong")
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a message of another rank is damaged: {error}") from None
    return value


def _dumps(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    return json.dumps(value, separators=(",", ":"), default=default)

"""Partial record: the measurements that one rank sends of one step, to be merged on rank 0.

Messages are a JSON header, and raw arrays behind it. The header is checked against the types of a
class's fields; nothing else is created from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache, lru_cache
from types import UnionType
from typing import Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.topology import LocalShard
from telemetry.records import AttentionHeads, Layout
from telemetry.records.batches import Batch, BatchId
from telemetry.records.rows import COLUMNS, NO_VALUES, Rows

Floats: TypeAlias = NDArray[np.float64]
Integers: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


class Row(NamedTuple):
    """Key of a tensor: the pipeline stage, the kind as in :class:`StepRecord`, the name there."""

    stage: int
    kind: str
    name: str
    place: int = 0


class Addend(NamedTuple):
    """Key of a gradient's addend: index of the parameter, copy, size. Equal keys add up."""

    parameter: int
    copy: int
    size: int


@dataclass(frozen=True, kw_only=True, eq=False)
class TensorTable:
    """Measured tensors; of several copies of a tensor only the lowest counts.

    Units that are split over ranks have a place for each rank's units, which merging fills in.
    """

    rows: tuple[Row, ...]
    copies: Integers
    content: Rows

    def __post_init__(self) -> None:
        content, sizes = self.content, {len(self.rows), len(self.copies)}
        fits = sizes == {len(content)} and content.units.shape[1:] == (2,)
        fits &= len(content.units) == content.unit_count.sum()
        fits &= len(content.buckets) == len(content.counts) == content.bucket_count.sum()
        if not fits or (content.unit_count < 0).any() or (content.bucket_count < 0).any():
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


@dataclass(frozen=True, kw_only=True, eq=False)
class ParameterPart:
    """Parameters of one rank's part of the model; arrays are in their order, None: unknown."""

    stage: int  # of a pipeline; 0 without one
    layout_id: str  # equal where the names of the parameters are
    layout: Layout | None  # None where it was sent before
    copies: Integers  # of several copies of a gradient only the lowest counts
    norms: Floats  # L2 norms of the gradients
    present: Flags
    finite: Flags
    before: Floats | None = None  # L2 norms at the end of the backward pass
    parameter_copies: Integers | None = None  # of the parameters, for the next two
    moved: Floats | None = None  # L2 norm of the step's update; NaN: not measured
    sizes: Floats | None = None  # L2 norm before the step; NaN: not measured
    # Gradients that are sums of the ranks' addends; ``norms`` and ``before`` are of the addends.
    addends: Mapping[Addend, Floats] = field(default_factory=dict)
    # Sums of bits, equal where shards are: index of the parameter, shard, sum ``[3, checks]``.
    checks: Integers | None = None
    # Names of buffers and parameters that have a NaN, or infinity.
    nan_buffers: tuple[str, ...] = ()
    nonfinite_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.norms)
        optional = (self.before, self.parameter_copies, self.moved, self.sizes)
        columns = (self.copies, self.norms, self.present, self.finite, *optional)
        checks = np.empty((3, 0), np.int64) if self.checks is None else self.checks
        indices = [*checks[0].tolist(), *(addend.parameter for addend in self.addends)]
        fits = all(column.shape == (count,) for column in columns if column is not None)
        fits &= checks.ndim == 2 and len(checks) == 3
        fits &= self.layout is None or len(self.layout.parameters) == count
        if not fits or not all(0 <= index < count for index in indices):
            raise ValueError("columns of parameters have different lengths")

    @property
    def key(self) -> tuple[int, str]:
        return self.stage, self.layout_id


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Values of a StepRecord that are alike on all ranks; the lowest rank's count."""

    learning_rates: tuple[float, ...] = ()
    loss_scale: float | None = None
    skipped_steps: int = 0
    skipped: bool = False
    eval_mode: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class PartialRecord:
    """Measurements of one rank at one step."""

    rank: int
    size: int  # number of ranks that train together
    step: int
    wall_time: float
    phase: str = ""
    sequence: int = 0  # sequence number of the step or phase: see PartMaker.numbered
    full: bool = False  # whether this is a full step on this rank
    shared: Shared = Shared()
    parameters: ParameterPart | None = None  # None: the step did not end
    tensors: TensorTable | None = None
    attention: Mapping[str, AttentionHeads] = field(default_factory=dict)  # by module
    scalars: Mapping[str, float] = field(default_factory=dict)  # logged by the user
    batches: tuple[Batch, ...] = ()  # since the last one, by the user's ids
    usage: Mapping[str, float] = field(default_factory=dict)  # times and memory, by tag
    # Tokens of each expert, by the module name of their router.
    expert_loads: Mapping[str, Integers] = field(default_factory=dict)
    step_s: float | None = None  # seconds from the step before
    host: str = ""  # empty where it was sent before
    # Digest of the batch, with the group of ranks that should have different ones; or empty.
    batch: str = ""
    nonfinite: str = ""  # first NaN or infinity that this rank did not receive from others
    unknown_sums: tuple[str, ...] = ()  # tensors whose addends are not sent

    @property
    def nbytes(self) -> int:
        """Bytes of the large arrays."""
        norms = 0 if self.parameters is None else self.parameters.norms.nbytes
        return norms + (0 if self.tensors is None else self.tensors.nbytes)


# --- messages ------------------------------------------------------------------------------------

Reader: TypeAlias = Callable[[Any, "_Arrays"], Any]

# Version of the messages; ranks with different ones do not connect.
FORMAT = "18"

_SIZE_BYTES = 4
_SCALARS: dict[Any, tuple[type, ...]] = {
    int: (int,), float: (int, float), bool: (bool,), str: (str,),
}  # fmt: skip
# Ranks send the same ones again and again: a text inside the header, parsed once.
_REPEATED = (Layout, tuple[Row, ...])
_REPEATED_KEPT = 2048


def encode(value: object) -> bytes:
    """Return bytes for :func:`decode`."""
    raw: list[bytes] = []
    header = _dumps(_plain(value, raw)).encode()
    return b"".join([len(header).to_bytes(_SIZE_BYTES, "big"), header, *raw])


def decode(kind: Any, data: bytes) -> Any:
    """Return the value of this type that :func:`encode` made these bytes of.

    Raises:
        ValueError: The bytes are damaged, or of a value of another type.
    """
    behind = _SIZE_BYTES + int.from_bytes(data[:_SIZE_BYTES], "big")
    arrays = _Arrays(data, behind)
    try:
        value = _reader(kind)(json.loads(data[_SIZE_BYTES:behind]), arrays)
        if arrays.at != len(data):
            raise ValueError("its length is wrong")
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"a message of another rank is damaged: {error}") from None
    return value


class _Arrays:
    """Reads arrays from the bytes behind a header, one after the other."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def read(self, described: list[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        name, *shape = described
        if name != dtype.str or any(type(size) is not int or size < 0 for size in shape):
            raise ValueError("an array has another type or shape")
        array = np.frombuffer(self._data, dtype, math.prod(shape), self.at).reshape(shape)
        self.at += array.nbytes
        # A small array must not keep all bytes in memory; a large one is not copied.
        return array.copy() if 4 * array.nbytes < len(self._data) else array


def _dumps(plain: Any) -> str:
    return json.dumps(plain, separators=(",", ":"))


def _plain(value: Any, raw: list[bytes]) -> Any:
    """Return a value for JSON; append the bytes of its arrays to ``raw``."""
    if isinstance(value, np.ndarray):
        raw.append(value.tobytes())
        return [value.dtype.str, *value.shape]
    if isinstance(value, Mapping):
        return [[_plain(key, raw), _plain(item, raw)] for key, item in value.items()]
    items: Any = value
    if is_dataclass(value):
        items = [getattr(value, field.name) for field in fields(value)]
    elif not isinstance(value, tuple):
        return value
    plain = [_plain(item, raw) for item in items]
    is_repeated = isinstance(value, Layout) or (items and type(items[0]) is Row)
    return _dumps(plain) if is_repeated else plain


def _checked(value: Any, *types: type) -> Any:
    if type(value) not in types:
        raise ValueError(f"{types[0].__name__} is missing")
    return value


@cache
def _reader(hint: Any) -> Reader:
    """Return a function that checks a header's value and makes a value of this type of it."""
    if hint not in _REPEATED:
        return _plain_reader(hint)
    read = _plain_reader(hint)
    parse = lru_cache(_REPEATED_KEPT)(lambda text: read(json.loads(text), _Arrays(b"", 0)))
    return lambda value, arrays: parse(_checked(value, str))


def _plain_reader(hint: Any) -> Reader:
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return lambda value, arrays: hint(_checked(value, *_SCALARS[hint]))
    if hint == BatchId:
        return lambda value, arrays: _checked(value, int, str)
    if origin in (Union, UnionType):  # with None
        read_some = _reader(args[0])
        return lambda value, arrays: None if value is None else read_some(value, arrays)
    if origin is np.ndarray:
        (of,) = get_args(args[1])
        dtype = COLUMNS if of is Any else np.dtype(of)
        return lambda value, arrays: arrays.read(_checked(value, list), dtype)
    if origin is tuple:  # of any length
        read_item = _reader(args[0])
        return lambda value, arrays: tuple([read_item(o, arrays) for o in _checked(value, list)])
    if origin is Mapping:
        read_pair = _list_reader(args)
        return lambda value, arrays: dict([read_pair(o, arrays) for o in _checked(value, list)])
    hints = get_type_hints(hint)  # of a NamedTuple or a dataclass
    read_fields = _list_reader(hints.values())
    return lambda value, arrays: hint(**dict(zip(hints, read_fields(value, arrays), strict=True)))


def _list_reader(hints: Iterable[Any]) -> Reader:
    """Return a function that reads a list with one item of each type."""
    readers = [_reader(hint) for hint in hints]

    def read(value: Any, arrays: _Arrays) -> list[Any]:
        items = zip(readers, _checked(value, list), strict=True)
        return [read_item(item, arrays) for read_item, item in items]

    return read

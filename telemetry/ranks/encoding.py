"""Parts as bytes: a heading in JSON and columns of numbers, compressed.

The columns of a part are what takes room, so they are written byte by byte of all their numbers:
first all lowest bytes, then all second ones. Counts and buckets are small whole numbers, and most
of their bytes are zero, of which compression leaves almost nothing.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.ranks.rank_part import Common, Figure, Nonfinite, RankPart
from telemetry.ranks.stage_part import Checks, StagePart
from telemetry.ranks.tensor_table import EMPTY, FIGURES, Row, Spreads, TensorTable
from telemetry.ranks.units import Units
from telemetry.records import Layout, Module, Parameter, Spread

FORMAT = b"telemetry-ranks-1\n"
"""What the bytes begin with; another version has another number."""

MAX_BYTES = 1 << 30
"""Of a part that is not compressed. 20,000 modules with four tensors each take about 200 MB."""

_DTYPES = ("<f8", "<f4", "<i8", "<i4", "<i2", "|b1")
_LEVEL = 1  # higher ones take several times as long for a tenth less


def encode(part: RankPart) -> bytes:
    """A part as bytes, for :func:`decode`."""
    columns = _Columns()
    heading = json.dumps(_plain(part, columns), separators=(",", ":")).encode()
    body = len(heading).to_bytes(8, "little") + heading + b"".join(columns.written)
    return FORMAT + zlib.compress(body, _LEVEL)


def decode(data: bytes) -> RankPart:
    """The part that :func:`encode` made these bytes of.

    Raises:
        ValueError: They are of another version of this package, damaged, or too many.
    """
    if not data.startswith(FORMAT):
        ours, theirs = FORMAT.decode().strip(), data[: len(FORMAT)].split(b"\n")[0]
        raise ValueError(
            f"these measurements are in the format {theirs!r} and not {ours!r}; "
            "install the same version of telemetry on every host"
        )
    try:
        unpack = zlib.decompressobj()
        body = unpack.decompress(data[len(FORMAT) :], MAX_BYTES)
        if not unpack.eof:
            raise ValueError(f"incomplete, or larger than {MAX_BYTES >> 20} MiB")
        size = int.from_bytes(body[:8], "little")
        return _part(json.loads(body[8 : 8 + size]), memoryview(body)[8 + size :])
    except (zlib.error, ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"measurements of another rank are damaged: {error}") from None


class _Columns:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self._size = 0

    def add(self, array: NDArray[Any] | None) -> list[Any] | None:
        """Where the array is, for the heading: offset, type and shape."""
        if array is None:
            return None
        array = np.ascontiguousarray(array)
        dtype = array.dtype.newbyteorder("<").str
        raw = array.astype(dtype, copy=False)
        planes = raw.reshape(-1).view(np.uint8).reshape(-1, raw.itemsize).T.tobytes()
        at = self._size
        self.written.append(planes)
        self._size += len(planes)
        return [at, dtype, list(array.shape)]


def _array(body: memoryview, where: Any) -> NDArray[Any]:
    at, dtype, shape = where
    if dtype not in _DTYPES:
        raise ValueError(f"an array of {dtype!r}")
    kind = np.dtype(dtype)
    count = math.prod(shape)
    if count < 0 or at < 0 or at + count * kind.itemsize > len(body):
        raise ValueError("an array lies outside of the data")
    planes = np.frombuffer(body, np.uint8, count * kind.itemsize, at)
    raw = np.ascontiguousarray(planes.reshape(kind.itemsize, count).T)
    array: NDArray[Any] = raw.reshape(-1).view(kind).reshape(shape)
    return array


def _optional(body: memoryview, where: Any) -> NDArray[Any] | None:
    return None if where is None else _array(body, where)


# --- the heading: what comes first in each pair writes, what comes second reads ------------------


def _plain(part: RankPart, columns: _Columns) -> dict[str, Any]:
    return {
        "step": part.step,
        "wall_time": part.wall_time,
        "size": part.size,
        "ranks": columns.add(_ranks(part.ranks)),
        "stages": [_plain_stage(stage, columns) for stage in part.stages],
        "tensors": _plain_table(part.tensors, columns) if part.tensors.rows else None,
        "common": vars(part.common),
        "phase": part.phase,
        "measured": columns.add(_ranks(part.measured)),
        "scalars": {name: asdict(figure) for name, figure in part.scalars.items()},
        "own": {name: asdict(figure) for name, figure in part.own.items()},
        "hosts": {host: columns.add(_ranks(ranks)) for host, ranks in part.hosts.items()},
        "nonfinite": part.nonfinite,
        "first_nonfinite": None if part.first_nonfinite is None else asdict(part.first_nonfinite),
        "not_known": sorted(part.not_known),
    }


def _part(plain: Mapping[str, Any], body: memoryview) -> RankPart:
    bad, common = plain["first_nonfinite"], plain["common"]
    hosts = {host: frozenset(_array(body, at).tolist()) for host, at in plain["hosts"].items()}
    return RankPart(
        **{name: plain[name] for name in ("step", "wall_time", "size", "phase")},
        ranks=frozenset(_array(body, plain["ranks"]).tolist()),
        measured=frozenset(_array(body, plain["measured"]).tolist()),
        stages=tuple(_stage(stage, body) for stage in plain["stages"]),
        tensors=EMPTY if plain["tensors"] is None else _table(plain["tensors"], body),
        common=Common(**common | {"learning_rates": tuple(common["learning_rates"])}),
        scalars={name: _figure(figure) for name, figure in plain["scalars"].items()},
        own={name: _figure(figure) for name, figure in plain["own"].items()},
        hosts=hosts,
        nonfinite=plain["nonfinite"],
        first_nonfinite=None if bad is None else Nonfinite(**bad),
        not_known=frozenset(plain["not_known"]),
    )


def _ranks(ranks: frozenset[int]) -> NDArray[np.int32]:
    return np.array(sorted(ranks), np.int32)


def _figure(plain: Mapping[str, Any]) -> Figure:
    spread = plain["spread"]
    return Figure(**{**plain, "spread": None if spread is None else Spread(**spread)})


_ARRAYS = ("copies", "norms", "present", "finite")
_OPTIONAL_ARRAYS = ("before", "parameter_copies", "moved", "sizes")
_NAMES = ("nan_buffers", "nonfinite_parameters")


def _plain_stage(stage: StagePart, columns: _Columns) -> dict[str, Any]:
    layout = stage.layout
    return {
        "stage": stage.stage,
        "layout_id": stage.layout_id,
        "layout": layout and [
            [[module.name, module.type_name] for module in layout.modules],
            [[p.name, p.module_name, list(p.shape)] for p in layout.parameters],
        ],
        **{name: columns.add(getattr(stage, name)) for name in _ARRAYS + _OPTIONAL_ARRAYS},
        "addends": [[index, columns.add(values)] for index, values in stage.addends.items()],
        "checks": columns.add(stage.checks.places),
        **{name: sorted(getattr(stage, name)) for name in _NAMES},
    }  # fmt: skip


def _stage(plain: Mapping[str, Any], body: memoryview) -> StagePart:
    layout = None
    if plain["layout"] is not None:
        modules, parameters = plain["layout"]
        layout = Layout(
            modules=tuple(Module(name=n, type_name=t) for n, t in modules),
            parameters=tuple(
                Parameter(name=n, module_name=m, shape=tuple(shape)) for n, m, shape in parameters
            ),
        )
    arrays: dict[str, Any] = {name: _array(body, plain[name]) for name in _ARRAYS}
    arrays |= {name: _optional(body, plain[name]) for name in _OPTIONAL_ARRAYS}
    names: dict[str, Any] = {name: frozenset(plain[name]) for name in _NAMES}
    return StagePart(
        stage=plain["stage"],
        layout_id=plain["layout_id"],
        layout=layout,
        addends={index: _array(body, at) for index, at in plain["addends"]},
        checks=Checks(places=_array(body, plain["checks"])),
        **arrays,
        **names,
    )


_SPREADS = ("low", "low_rank", "high", "high_rank")
_COLUMNS = ("copies", "calls", "figures", "bucket_sizes", "buckets")


def _plain_table(table: TensorTable, columns: _Columns) -> dict[str, Any]:
    whole = table.counts == np.floor(table.counts)
    counts = np.where(whole, table.counts, -1).astype(np.int64)
    return {
        "rows": [list(row) for row in table.rows],
        **{name: columns.add(getattr(table, name)) for name in _COLUMNS},
        # Scaled-up counts of samples are not whole; single precision is far finer than a sample.
        "counts": columns.add(counts),
        "fractions": columns.add(table.counts[~whole].astype(np.float32)),
        "units": [columns.add(a) for a in (table.units.pieces, table.units.low, table.units.high)],
        "rms": [columns.add(getattr(table.rms, name)) for name in _SPREADS],
    }


def _table(plain: Mapping[str, Any], body: memoryview) -> TensorTable:
    counts = _array(body, plain["counts"]).astype(np.float64)
    counts[counts < 0] = _array(body, plain["fractions"])
    pieces, low, high = (_array(body, at) for at in plain["units"])
    spreads = {name: _array(body, at) for name, at in zip(_SPREADS, plain["rms"], strict=True)}
    table = TensorTable(
        rows=tuple(Row(*row) for row in plain["rows"]),
        counts=counts,
        units=Units(pieces=pieces, low=low, high=high),
        rms=Spreads(**spreads),
        **{name: _array(body, plain[name]) for name in _COLUMNS},
    )
    sizes = int(table.bucket_sizes.sum())
    if table.figures.shape != (len(table.rows), len(FIGURES)) or sizes != table.buckets.size:
        raise ValueError("its columns do not fit together")
    return table

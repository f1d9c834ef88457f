"""Extremes of each unit of the layers' outputs: their encoding, and ranges of units as text."""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from telemetry.layers.module_types import BOUNDED
from telemetry.layers.record import Group
from telemetry.records import StepRecord
from telemetry.records.rows import NO_VALUES

# Limit of one step before compression: 8 bytes for each layer, run of dead units, and other unit.
MOST_BYTES = 64 << 10
MOST_LAYERS = 4096
_LEVEL = 1  # of zlib; higher ones take longer, and hardly fewer bytes
# Limit of a layer that is read: four times the largest vocabularies.
_MOST_UNITS = 1 << 20

_LARGEST = np.uint32(0x7F7F0000).view(np.float32)  # largest float32 with 8 bits of mantissa
_NAN = np.uint32(0x7FC00000)


def with_parts(record: StepRecord, outputs: Group) -> Group:
    """Return the layers' outputs, where units of routers are experts, and of attention heads.

    Both extremes of an expert are its number of tokens, and of a head its largest logit. Attention
    modules that returned a tensor with units keep those.
    """
    position, rows = record.layout.position, outputs.rows
    parts: dict[int, NDArray[Any]] = {
        row: heads.logit_max
        for name, heads in record.attention.items()
        if (row := position.get(name)) is not None and not rows.unit_count[row]
    }
    parts |= {position[n]: load for n, load in record.expert_loads.items() if n in position}
    if not parts:
        return outputs
    units = [rows.units_of(row) for row in range(len(rows))]
    for row, values in parts.items():
        units[row] = np.repeat(values, 2).reshape(-1, 2).astype(np.float32)
    known = [rows.units[:0] if of is None else of for of in units]
    rows = rows.having(np.concatenate(known), unit_count=[len(of) for of in known])
    return replace(outputs, rows=rows)


def encode_units(outputs: Group) -> bytes:
    """Encode the units of some layers in at most :data:`MOST_BYTES`; empty without units.

    The format is pairs of little-endian uint32: numbers of layers and of runs of dead units; each
    layer's module and number of units; first index and end of each run, counted over all layers.
    The index of each other unit follows, with its extremes as the upper 16 bits of float32, rounded
    away from zero: the largest in the upper half, the smallest in the lower one. If not all units
    fit, each layer keeps the same number, with the largest values. The first numbers of all pairs
    precede the second ones, and zlib compresses them.
    """
    chosen = np.flatnonzero(outputs.rows.unit_count)[:MOST_LAYERS]
    if not len(chosen):
        return b""
    rows = outputs.rows.take(chosen)
    heads = np.array([outputs.modules[chosen], rows.unit_count]).T
    dead = (rows.units[:, 0] == 0) & (rows.units[:, 1] == 0)
    room = MOST_BYTES // 8 - 1 - len(heads)
    runs = _runs(dead)[:room]
    places = np.flatnonzero(~dead)
    low, high = _rounded(rows.units[places].T)
    if len(places) > room - len(runs):
        layers = np.arange(len(rows), dtype=np.uint32).repeat(rows.unit_count)[places]
        sizes = np.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF) >> 16
        largest_first = np.argsort(layers << 15 | 0x7FFF - sizes)
        alive = np.bincount(layers, minlength=len(rows))
        rank = np.arange(len(places)) - (np.cumsum(alive) - alive).repeat(alive)
        kept = np.sort(largest_first[np.argpartition(rank, room - len(runs))[: room - len(runs)]])
        places, low, high = places[kept], low[kept], high[kept]
    extremes = np.array([places, low >> 16 | high & 0xFFFF0000]).T
    pairs = np.concatenate([[[len(heads), len(runs)]], heads, runs, extremes])
    return zlib.compress(pairs.astype("<u4").T.tobytes(), _LEVEL)


def decode_units(data: object, module: int) -> NDArray[np.float32] | None:
    """Decode the extremes of each unit of a module, ``[units, 2]``; None without units.

    Both are 0 for a dead unit, and :data:`~telemetry.records.rows.NO_VALUES` for an omitted one.
    They are up to 0.8 % further from zero than measured. Data of another format raises ValueError.
    """
    try:
        content = zlib.decompressobj().decompress(data, MOST_BYTES + 1)  # type: ignore[arg-type]
    except (zlib.error, TypeError):
        content = b""
    if not content or len(content) > MOST_BYTES or len(content) % 8:
        raise ValueError("it does not hold units")
    pairs = np.frombuffer(content, "<u4").reshape(2, -1).T.astype(np.int64)
    heads, runs, kept = np.split(pairs[1:], [pairs[0, 0], pairs[0].sum()])
    layer = np.flatnonzero(heads[:, 0] == module)
    if not len(layer):
        return None
    size, end = heads[layer[0], 1], heads[: layer[0] + 1, 1].sum()
    if size > _MOST_UNITS:
        raise ValueError(f"a layer has {size} units")
    units = np.tile(NO_VALUES, (size, 1))
    changes = np.zeros(size + 1, np.int64)
    first, behind = np.clip(runs - (end - size), 0, size).T
    np.add.at(changes, first, 1)
    np.add.at(changes, behind, -1)
    units[changes.cumsum()[:-1] > 0] = 0
    places, extremes = kept[(kept[:, 0] >= end - size) & (kept[:, 0] < end)].T
    halves = np.stack([extremes << 16, extremes & 0xFFFF0000], axis=1).astype(np.uint32)
    units[places - (end - size)] = halves.view(np.float32)
    return units


def saturated_units(type_name: str, units: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Whether each unit, extremes ``[..., 2]``, is always at one flat end of its function."""
    low, high = units[..., 0], units[..., 1]
    if type_name not in BOUNDED:
        return np.zeros(low.shape, bool)
    flat = BOUNDED[type_name].flat
    at_one_end: NDArray[np.bool_] = (high <= flat.low) | (low >= flat.high)
    return at_one_end & (low <= high)


def ranges(chosen: NDArray[np.bool_], most: int = 10) -> str:
    """Format the chosen units as ``0-11, 40``; after ``most`` ranges, the number of others."""
    runs = [(first, behind - 1) for first, behind in _runs(chosen).tolist()]
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs[:most])
    more = sum(last - first + 1 for first, last in runs[most:])
    return f"{shown} and {more} more" if more else shown


def _runs(chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the first index and the end of each run of chosen neighbors, ``[runs, 2]``."""
    padded = np.concatenate([[False], chosen, [False]])
    return np.flatnonzero(padded[1:] != padded[:-1]).reshape(-1, 2)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Round float32 to its upper 16 bits; values other than zero, and finite ones, remain so."""
    bounded = np.where(np.isinf(values), values, np.clip(values, -_LARGEST, _LARGEST))
    bits = np.ascontiguousarray(bounded).view(np.uint32) + np.uint32(0xFFFF)
    return np.where(np.isnan(values), _NAN, bits)

"""Read tags of numbers in batches, cache them, and compute statistics of layers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from telemetry.events.page_format import EVENTS_PER_TAG, PLUGIN_NAME, ChunkKind
from telemetry.layers import MISSING, PAGE_STATISTICS
from telemetry.reading.sessions import NumberTag, Segment
from telemetry.reading.sources import Problems, RunSource
from telemetry.untrusted import MAX_INTEGER

# Limit of one answer; beyond it, steps are omitted.
READ_BYTES = 256 << 20
# Tags per call.
CALL_TAGS = 100
_CACHE_BYTES = 512 << 20

# Statistics that are computed from the parameters' gradient norms, ``n`` tags.
EVERY_STEP = {statistic.name for statistic in PAGE_STATISTICS if statistic.every_step}

Numbers: TypeAlias = tuple[NDArray[np.int64], NDArray[np.float32]]
"""Steps ``[k]`` and their numbers: of an ``m`` tag ``[k, modules, statistics]``, of an ``n`` tag
``[k, parameters]``."""


class NumberCache:
    """Cache of the most recently read numbers of one run."""

    def __init__(self) -> None:
        self.nbytes = 0
        # By tag and ``sampled``: the tag's last step at that time, and the numbers.
        self._known: OrderedDict[tuple[str, bool], tuple[int, Numbers]] = OrderedDict()

    def clear(self) -> None:
        self._known.clear()
        self.nbytes = 0

    def read(
        self, source: RunSource, wanted: Sequence[NumberTag], sampled: bool
    ) -> Iterator[tuple[NumberTag, Numbers]]:
        """Yield the readable tags and their numbers."""
        for start in range(0, len(wanted), CALL_TAGS):
            batch = wanted[start : start + CALL_TAGS]
            found: dict[str, Numbers] = {}
            for tag in batch:
                last, numbers = self._known.get((tag.tag, sampled), (None, None))
                if numbers is not None and last == tag.last:
                    self._known.move_to_end((tag.tag, sampled))
                    found[tag.tag] = numbers
            missing = [tag for tag in batch if tag.tag not in found]
            names = [tag.tag for tag in missing]
            read = source.read(PLUGIN_NAME, names, sampled=sampled) if names else {}
            for tag in missing:
                if read.get(tag.tag):
                    found[tag.tag] = _join(tag, read[tag.tag], source.problems)
                    self._remember((tag.tag, sampled), tag.last, found[tag.tag])
            yield from ((tag, found[tag.tag]) for tag in batch if tag.tag in found)

    def _remember(self, key: tuple[str, bool], last: int, numbers: Numbers) -> None:
        if key in self._known:
            self.nbytes -= self._known.pop(key)[1][1].nbytes
        self._known[key] = last, numbers
        self.nbytes += numbers[1].nbytes
        while self.nbytes > _CACHE_BYTES:
            self.nbytes -= self._known.popitem(last=False)[1][1][1].nbytes


def within_limit(wanted: Sequence[NumberTag]) -> tuple[bool, Sequence[NumberTag]]:
    """Return whether to omit steps, and the tags to read."""
    total = sum(tag.estimated_bytes for tag in wanted)
    if total <= READ_BYTES:
        return False, wanted
    # Only one event of each tag is read: about a tenth.
    return True, wanted[:: max(1, -(-total // (EVENTS_PER_TAG * READ_BYTES)))]


def _join(tag: NumberTag, points: Sequence[tuple[int, Any]], problems: Problems) -> Numbers:
    """Concatenate all events of a tag."""
    shape = tag.segment.shape(tag.kind)
    steps, values = [np.empty(0, np.int64)], [np.empty((0, *shape), np.float32)]
    for step, value in points:
        try:
            event_steps, event_values = _event_numbers(tag.kind, step, value, shape)
        except ValueError as error:
            problems.add(tag.tag, error)
        else:
            steps.append(event_steps)
            values.append(event_values)
    return np.concatenate(steps), np.concatenate(values)


def _event_numbers(kind: ChunkKind, step: int, array: object, shape: tuple[int, ...]) -> Numbers:
    """Return steps and numbers of one event; an event of norms has several steps.

    Raises:
        ValueError: It does not fit the layout.
    """
    if not isinstance(array, np.ndarray) or array.dtype != np.float32:
        raise ValueError("it does not hold float32 numbers")
    if kind == "m":
        distances, values = np.zeros(1), array[None]
    elif array.ndim == 2 and array.shape[1]:
        distances, values = array[:, 0].astype(np.float64), array[:, 1:]
    else:
        raise ValueError(f"it has the shape {list(array.shape)}")
    if values.shape[1:] != shape:
        raise ValueError(
            f"it has {list(values.shape[1:])} numbers per step, its layout has {list(shape)}"
        )
    exact = step + distances
    if not ((exact >= 0) & (exact <= MAX_INTEGER)).all():
        raise ValueError("its steps must be from 0 to 2**53")
    return step + distances.astype(np.int64), values


def of_modules(
    segment: Segment, values: NDArray[np.float32], name: str, modules: NDArray[np.intp]
) -> NDArray[np.float32] | None:
    """Return one statistic of some modules of a segment, ``[k, modules]``; None without it.

    Args:
        values: Numbers of an ``n`` tag for a statistic of :data:`EVERY_STEP`, else of an ``m`` tag.
        modules: Indices in the segment's layout, ascending.
    """
    if name not in EVERY_STEP:
        names = segment.statistic_names
        return values[:, modules, names.index(name)] if name in names else None
    owners, order = segment.layout.owners, segment.layout.depth_order
    own = order[np.isin(owners[order], modules)]
    owning, starts = np.unique(owners[own], return_index=True)

    def sums(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
        """Sum over each module's parameters, ``[k, modules]``."""
        found = np.zeros((len(numbers), len(modules)))
        if len(own):
            found[:, np.searchsorted(modules, owning)] = np.add.reduceat(numbers, starts, axis=1)
        return found

    norms = values[:, own]
    present = norms != MISSING
    total = sums(np.where(present, np.square(norms, dtype=np.float64), 0.0))
    if name == "grad_rms":
        with np.errstate(invalid="ignore", divide="ignore"):
            total = total / sums(np.where(present, segment.layout.sizes[own], 0.0))
    known = sums(present.astype(np.float64)) > 0
    if name == "grad_share":
        all_norms = np.where(values != MISSING, values, 0.0).astype(np.float64)
        of_model = np.square(all_norms).sum(axis=1, keepdims=True)
        with np.errstate(invalid="ignore", divide="ignore"):
            share = total / of_model
        return np.where(known & (of_model != 0), share, MISSING).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.where(known, np.sqrt(total), MISSING).astype(np.float32)

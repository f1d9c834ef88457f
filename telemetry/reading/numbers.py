"""Reads tags of numbers in batches, and caches them so that only new data is read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from telemetry.page_format import EVENTS_PER_TAG, NORM_BLOCK_BYTES, PLUGIN_NAME, ChunkKind
from telemetry.reading.sessions import Segment, TagRange
from telemetry.reading.sources import Point, Problems, RunSource
from telemetry.untrusted import MAX_WHOLE

READ_BYTES = 256 << 20
"""Most that is read for one answer; if it would be more, steps are left out."""
CALL_TAGS = 200
_CALL_BYTES = 64 << 20  # TensorBoard's data server sends at most 256 MiB in one message
_CACHE_BYTES = 512 << 20
_STEPS_BEYOND = 64  # of a block of norms: what one may hold above its limit


@dataclass(frozen=True, kw_only=True, eq=False)
class Numbers:
    """The content of one tag.

    Attributes:
        last: The tag's last step when it was read.
        steps: int64, shape ``[k]``.
        values: float32, shape ``[k, modules, statistics]`` or ``[k, parameters]``.
    """

    last: int
    steps: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class Wanted:
    """A tag to read.

    Attributes:
        kind: The tag's kind.
        segment: The segment that it belongs to; gives the shape of its values.
        tag: The tag.
        layer_count: Layers of the run: a row of values may be spread over all of them.
    """

    kind: ChunkKind
    segment: Segment
    tag: TagRange
    layer_count: int

    @property
    def estimated_bytes(self) -> int:
        """The most that it holds if telemetry wrote it."""
        steps = max(0, self.tag.last - self.tag.after)
        step_bytes = 4 * max(self.segment.width(self.kind), self.layer_count)
        if self.kind == "m":
            return step_bytes * min(steps, EVENTS_PER_TAG)
        block_bytes = NORM_BLOCK_BYTES + _STEPS_BEYOND * step_bytes
        return min(step_bytes * steps, EVENTS_PER_TAG * block_bytes)


class NumberCache:
    """The numbers of one run that were read most recently."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._known: OrderedDict[tuple[str, bool], Numbers] = OrderedDict()

    def clear(self) -> None:
        self._known.clear()
        self.nbytes = 0

    def read(
        self, source: RunSource, wanted: Sequence[Wanted]
    ) -> tuple[bool, Iterator[tuple[Segment, Numbers]]]:
        """Whether steps are left out, and the content of the tags."""
        total = sum(item.estimated_bytes for item in wanted)
        sampled = total > READ_BYTES
        if sampled:
            # Only one event of each tag is read, which is about a tenth of it.
            wanted = wanted[:: max(1, -(-total // (EVENTS_PER_TAG * READ_BYTES)))]
        return sampled, self._numbers(source, wanted, sampled)

    def _numbers(
        self, source: RunSource, wanted: Sequence[Wanted], sampled: bool
    ) -> Iterator[tuple[Segment, Numbers]]:
        for batch in _batches(wanted, sampled):
            found = self._read_batch(source, batch, sampled)
            for item in batch:
                if item.tag.tag in found:
                    yield item.segment, found[item.tag.tag]

    def _read_batch(
        self, source: RunSource, batch: Sequence[Wanted], sampled: bool
    ) -> dict[str, Numbers]:
        found: dict[str, Numbers] = {}
        missing = []
        for item in batch:
            key = (item.tag.tag, sampled)
            cached = self._known.get(key)
            if cached is not None and cached.last == item.tag.last:
                self._known.move_to_end(key)
                found[item.tag.tag] = cached
            else:
                missing.append(item)
        if missing:
            tags = [item.tag.tag for item in missing]
            points = source.read_tensors(PLUGIN_NAME, tags, sampled=sampled)
            for item in missing:
                if points.get(item.tag.tag):
                    numbers = _join(item, points[item.tag.tag], source.problems)
                    self._remember((item.tag.tag, sampled), numbers)
                    found[item.tag.tag] = numbers
        return found

    def _remember(self, key: tuple[str, bool], numbers: Numbers) -> None:
        old = self._known.pop(key, None)
        self.nbytes += numbers.values.nbytes - (old.values.nbytes if old else 0)
        self._known[key] = numbers
        while self.nbytes > _CACHE_BYTES:
            _, oldest = self._known.popitem(last=False)
            self.nbytes -= oldest.values.nbytes


def _batches(wanted: Sequence[Wanted], sampled: bool) -> Iterator[list[Wanted]]:
    batch: list[Wanted] = []
    nbytes = 0
    for item in wanted:
        size = item.estimated_bytes // (EVENTS_PER_TAG if sampled else 1)
        if batch and (len(batch) == CALL_TAGS or nbytes + size > _CALL_BYTES):
            yield batch
            batch, nbytes = [], 0
        batch.append(item)
        nbytes += size
    if batch:
        yield batch


def _join(item: Wanted, points: Sequence[Point], problems: Problems) -> Numbers:
    """All events of a tag as one array."""
    shape = item.segment.shape(item.kind)
    steps, values = [np.empty(0, np.int64)], [np.empty((0, *shape), np.float32)]
    for point in points:
        try:
            event_steps, event_values = _event_numbers(item.kind, point, shape)
        except ValueError as error:
            problems.add(item.tag.tag, error)
        else:
            steps.append(event_steps)
            values.append(event_values)
    return Numbers(last=item.tag.last, steps=np.concatenate(steps), values=np.concatenate(values))


def _event_numbers(
    kind: ChunkKind, point: Point, shape: tuple[int, ...]
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Steps ``[k]`` and values ``[k, *shape]`` of one event; an event of norms has several steps.

    Raises:
        ValueError: They do not fit the layout.
    """
    array = point.value
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
    exact = point.step + distances
    if not ((exact >= 0) & (exact <= MAX_WHOLE)).all():
        raise ValueError("its steps must be from 0 to 2**53")
    return point.step + distances.astype(np.int64), values

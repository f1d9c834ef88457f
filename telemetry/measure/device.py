"""Measures tensors on an accelerator with PyTorch's own operations; the same code runs on the CPU.

The device computes only what needs every element: the norm, the sum, and the extremes (of each
unit), each by one operation that reads the tensor in place. All else comes from a sample, the one
that the CPU takes, too. It goes to the host, which measures it as it measures any tensor. Of small
tensors all elements go there, and the row is that of a tensor in CPU memory.

No operation here waits for the device, reads a value, draws a number, or has a shape that depends
on values. None writes to a tensor of the user.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.measure.estimates import Exact, completed
from telemetry.measure.native import rows_of
from telemetry.measure.tensors import FULL_ELEMENTS, Values, block_sample, working
from telemetry.records.rows import Rows
from telemetry.records.sketch import SAMPLE_ELEMENTS
from telemetry.torch_private import norms_of
from telemetry.torch_private.host_copy import HostCopy, current_stream, send

is_on_host: Callable[[Tensor], bool] = attrgetter("is_cpu")
"""Whether a tensor is in CPU memory. Tests replace it, to measure such tensors here, too."""

# What one step sends to the host is in pinned memory. Most steps need half of this; in the other
# half all tensors that a step has at most find room, because each sends little.
STEP_BYTES = 64 << 20
FEW_ELEMENTS = 1024

# Bounds the memory on the device: so many bytes are joined, and sent, before the step ends.
PILE_BYTES = 8 << 20

_PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Place(NamedTuple):
    """Elements of a pile."""

    pile: tuple[torch.dtype, int]  # dtype and number of axes of its parts
    start: int
    end: int


class _Pile:
    """Numbers, vectors or samples ``[k, 16]`` of one dtype that go to the host together.

    Samples become bfloat16, which leaves the bucket of each value as it is. Magnitudes below
    4.6e-41, as of masked attention weights, become zeros.
    """

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        self.count = 0  # of elements, since the beginning
        self._joined: list[HostCopy] = []

    def join(self, streams: Collection[Any]) -> None:
        """Join the parts on the current stream, which waits for the others."""
        parts, self.parts = self.parts, []
        if not parts:
            return
        if len(streams) > 1:
            current = current_stream(parts[0].device)
            for other in streams:
                if other != current:
                    current.wait_stream(other)
            for part in parts:
                part.record_stream(current)
        joined = torch.cat(parts) if parts[0].dim() else torch.stack(parts)
        if joined.dim() == 2:
            joined = joined.to(torch.bfloat16)
        self._joined.append(HostCopy(joined, owned=True))

    def read(self) -> Tensor:
        """Return all elements on the host, ``[n]``; waits for the device."""
        return torch.cat([copy.wait().view(-1) for copy in self._joined])


class _Sampled(NamedTuple):
    """Large tensor; ``low`` and ``high`` are of each unit, or of the tensor."""

    number: int
    elements: int
    powers: int
    has_units: bool
    low: Place
    high: Place
    total: Place
    sample: Place


class _Whole(NamedTuple):
    """Small tensor, all of whose elements are sent."""

    number: int
    shape: tuple[int, ...]
    unit_axis: int | None
    powers: int
    elements: Place


class DeviceRows:
    """Rows of one step's tensors on one device. Used with autocast and dispatch modes off."""

    def __init__(self, device: torch.device) -> None:
        self.nbytes = self._sent_bytes = 0
        self._device = device
        self._piles: defaultdict[tuple[torch.dtype, int], _Pile] = defaultdict(_Pile)
        self._sampled: list[_Sampled] = []
        self._norms: list[Place] = []  # of each of these
        self._whole: list[_Whole] = []
        self._streams: dict[Any, None] = {}  # on which tensors were added

    @property
    def numbers(self) -> list[int]:
        """Index of the tensor of each row."""
        return [row.number for row in self._sampled] + [row.number for row in self._whole]

    def add(self, tensors: Sequence[Values], powers: int, first: int) -> None:
        """Queue the measurement of non-empty tensors of one dtype, numbered from ``first`` on.

        A large tensor takes 4 launches, or 6 with units in a middle axis; a small one takes 1.
        Several at once share the launches of their norms and of what is sent.
        """
        self._streams.setdefault(current_stream(self._device))
        whole: list[_Whole] = []
        sampled: list[_Sampled] = []
        large: list[Tensor] = []
        is_alone = len(tensors) == 1
        for number, values in enumerate(tensors, first):
            x, axis = _readable(values)
            count, many = x.numel(), self.nbytes < STEP_BYTES // 2
            if count <= (FULL_ELEMENTS if many else FEW_ELEMENTS):
                # Of several, the views are joined below, before anything changes the tensors.
                part = x.clone(memory_format=torch.contiguous_format) if is_alone else x
                place = self._put(part.reshape(-1))
                whole.append(_Whole(number, tuple(x.shape), axis, powers, place))
                continue
            sample = block_sample(x, SAMPLE_ELEMENTS if many else FEW_ELEMENTS)
            if is_alone:
                sample = sample.to(torch.bfloat16, copy=True)
            parts = *_extremes(x, axis), x.sum(dtype=_wide(x.dtype)), sample
            places = [self._put(part) for part in parts]
            sampled.append(_Sampled(number, count, powers, axis is not None, *places))
            large.append(x)
        norms = norms_of(large, 2, _wide(large[0].dtype)) if large else []
        # Only now, as an operation may raise for want of memory.
        self._norms += map(self._put, norms)
        self._sampled += sampled
        self._whole += whole
        if not is_alone or self.nbytes - self._sent_bytes >= PILE_BYTES:
            self.send()

    def _put(self, part: Tensor) -> Place:
        key, count = (part.dtype, part.dim()), part.numel()
        self.nbytes += count * (2 if part.dim() == 2 else part.itemsize)
        pile = self._piles[key]
        start, pile.count = pile.count, pile.count + count
        pile.parts.append(part)
        return Place(key, start, pile.count)

    def send(self) -> int:
        """Start the copies to the host of what was added; return the bytes of all."""
        for pile in self._piles.values():
            pile.join(self._streams)
        self._sent_bytes = self.nbytes
        send(self._device)
        return self.nbytes

    def decode(self) -> Rows:
        """Wait for the copies and return the rows, in the order of :attr:`numbers`."""
        read = {key: pile.read() for key, pile in self._piles.items()}

        def at(place: Place) -> Tensor:
            return read[place.pile][place.start : place.end]

        whole = rows_of(
            (Values(at(row.elements).view(row.shape), row.unit_axis), row.powers)
            for row in self._whole
        )
        if not self._sampled:
            return whole

        def figures(places: Iterable[Place]) -> NDArray[np.float64]:
            return torch.cat([at(place) for place in places]).to(torch.float64).numpy()

        rows = self._sampled
        exact = Exact(
            count=np.array([row.elements for row in rows]),
            powers=np.array([row.powers for row in rows]),
            has_units=np.array([row.has_units for row in rows]),
            norm=figures(self._norms),
            total=figures(row.total for row in rows),
            sizes=np.array([row.low.end - row.low.start for row in rows]),
            lows=figures(row.low for row in rows),
            highs=figures(row.high for row in rows),
        )
        samples = rows_of((Values(at(row.sample), None), 4) for row in rows)
        return Rows.concatenate([completed(samples, exact), whole])


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms and sums; a wider one would make the device copy the tensor."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _readable(values: Values) -> tuple[Tensor, int | None]:
    """Return a tensor that all operations read, and its axis of units; a copy of rare dtypes.

    A dense one has the shape ``[elements]``, or ``[outer, units, inner]``.
    """
    tensor, axis, _ = values.collapsed()
    return tensor if tensor.dtype in _PLAIN else working(tensor), axis


def _extremes(x: Tensor, axis: int | None) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value (of each unit); NaN where there is one.

    In one read of a dense tensor, in two of another.
    """
    if axis is None:
        low, high = torch.aminmax(x)
    elif not x.is_contiguous():
        others = [other for other in range(x.dim()) if other != axis]
        low, high = (x.amin(others), x.amax(others)) if others else (x.clone(), x.clone())
    elif x.shape[2] == 1:
        low, high = torch.aminmax(x[:, :, 0], dim=0)
    else:
        low, high = torch.aminmax(x, dim=2)
        low, high = (low.amin(0), high.amax(0)) if len(x) > 1 else (low[0], high[0])
    return low, high

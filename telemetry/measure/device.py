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
from collections.abc import Callable, Collection, Sequence
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

    pile: tuple[torch.dtype, str]
    start: int
    end: int


class _Pile:
    """Parts of one dtype that go to the host together: numbers, vectors, or samples.

    Samples ``[k, 16]`` become bfloat16, which leaves the bucket of each value as it is.
    """

    def __init__(self, kind: str) -> None:
        self.parts: list[Tensor] = []
        self.count = 0  # of elements, since the beginning
        self._kind = kind
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
        joined = torch.stack(parts) if self._kind == "numbers" else torch.cat(parts)
        if self._kind == "samples":
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
        self.nbytes = self._joined_bytes = self._sent_bytes = 0
        self._device = device
        self._piles: dict[tuple[torch.dtype, str], _Pile] = {}
        self._sampled: list[tuple[_Sampled, Place]] = []  # each with its norm
        self._whole: list[_Whole] = []
        self._streams: dict[Any, None] = {}  # on which tensors were added

    @property
    def numbers(self) -> list[int]:
        """Index of the tensor of each row."""
        return [row.number for row, _ in self._sampled] + [row.number for row in self._whole]

    def add(self, tensors: Sequence[Values], powers: int, first: int) -> None:
        """Queue the measurement of non-empty tensors, numbered from ``first`` on.

        A large tensor takes 4 launches, or 6 with units in a middle axis; a small one takes 1.
        Several at once share the launches of their norms and of what is sent.
        """
        self._streams.setdefault(current_stream(self._device))
        whole: list[_Whole] = []
        large: defaultdict[torch.dtype, list[tuple[Tensor, _Sampled]]] = defaultdict(list)
        is_alone = len(tensors) == 1
        for number, values in enumerate(tensors, first):
            x, axis = _readable(values)
            count, many = x.numel(), self.nbytes < STEP_BYTES // 2
            if count <= (FULL_ELEMENTS if many else FEW_ELEMENTS):
                # Of several, the views are joined below, before anything changes the tensors.
                part = x.clone(memory_format=torch.contiguous_format) if is_alone else x
                place = self._put("whole", part.reshape(-1))
                whole.append(_Whole(number, tuple(x.shape), axis, powers, place))
                continue
            sample = block_sample(x, SAMPLE_ELEMENTS if many else FEW_ELEMENTS)
            if is_alone:
                sample = sample.to(torch.bfloat16, copy=True)
            low, high = _extremes(x, axis)
            figures = self._put_figure(low), self._put_figure(high)
            total = self._put_figure(x.sum(dtype=_wide(x.dtype)))
            places = *figures, total, self._put("samples", sample)
            row = _Sampled(number, count, powers, axis is not None, *places)
            large[x.dtype].append((x, row))
        for dtype, rows in large.items():
            norms = norms_of([x for x, _ in rows], 2, _wide(dtype))
            for (_, row), norm in zip(rows, norms, strict=True):
                self._sampled.append((row, self._put_figure(norm)))
        self._whole += whole
        if not is_alone or self.nbytes - self._joined_bytes >= PILE_BYTES:
            self._join()

    def _put_figure(self, figure: Tensor) -> Place:
        return self._put("vectors" if figure.dim() else "numbers", figure)

    def _put(self, kind: str, part: Tensor) -> Place:
        key, count = (part.dtype, kind), part.numel()
        pile = self._piles.get(key)
        if pile is None:
            pile = self._piles[key] = _Pile(kind)
        self.nbytes += count * (2 if kind == "samples" else part.itemsize)
        start, pile.count = pile.count, pile.count + count
        pile.parts.append(part)
        return Place(key, start, pile.count)

    def _join(self) -> None:
        for pile in self._piles.values():
            pile.join(self._streams)
        self._joined_bytes = self.nbytes
        if self.nbytes - self._sent_bytes >= PILE_BYTES:
            self._sent_bytes = self.nbytes
            send(self._device)

    def send(self) -> int:
        """Start the copies to the host; return their bytes. Nothing can be added afterwards."""
        self._join()
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
        arrays = {
            key: values.to(torch.float64).numpy()
            for key, values in read.items()
            if key[1] in ("numbers", "vectors")
        }

        def figures(places: Sequence[Place]) -> NDArray[np.float64]:
            return np.concatenate([arrays[pile][start:end] for pile, start, end in places])

        rows = [row for row, _ in self._sampled]
        exact = Exact(
            count=np.array([row.elements for row in rows]),
            powers=np.array([row.powers for row in rows]),
            has_units=np.array([row.has_units for row in rows]),
            norm=figures([norm for _, norm in self._sampled]),
            total=figures([row.total for row in rows]),
            sizes=np.array([row.low.end - row.low.start for row in rows]),
            lows=figures([row.low for row in rows]),
            highs=figures([row.high for row in rows]),
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

"""Norms of gradients, parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.capture.parameters import plain
from telemetry.host_copy import HostCopy
from telemetry.torch_private import joined, norms_of

_CPU = torch.device("cpu")

_SMALL = 256
_MANY = 64
_JOINED = 64
"""So many tensors in CPU memory, of at most so many elements, are joined to be reduced together; so
many at a time, to stay in a core's cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Norms:
    """Norms of some tensors of one device, on that device.

    Attributes:
        indices: Which tensors.
        values: Their L2 norms ``[k]``; on an accelerator a second row ``[2, k]`` with the largest
            magnitudes, which stay finite where the sum of squares overflows float32.
        known_nonfinite: Whether an element is not finite, as far as known without waiting.
    """

    indices: tuple[int, ...]
    values: Tensor
    known_nonfinite: bool = False

    @property
    def nonfinite(self) -> Tensor:
        """Whether any element behind them is not finite, bool ``[]`` on the device."""
        return self.values.view(-1, len(self.indices))[-1].isfinite().all().logical_not()

    def sent(self) -> NormReading:
        """The same on its way to the host."""
        values = self.values
        on_host = values.device.type == "cpu"
        return NormReading(
            indices=self.indices,
            wait=(lambda: values) if on_host else HostCopy(values).wait,
            on_host=on_host,
            largest_known=values.dim() == 2,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NormReading:
    """:class:`Norms`, perhaps still on their way to the host; ``wait`` gives the values."""

    indices: tuple[int, ...]
    wait: Callable[[], Tensor]
    on_host: bool
    largest_known: bool

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """Norms, float64 ``[k]``, and whether all elements were finite, ``[k]``."""
        values = self.wait().to(torch.float64).numpy()
        if not self.largest_known:
            return values, np.isfinite(values)
        return values[0], np.isfinite(values[1])


def take_norms(tensors: Iterable[tuple[int, Tensor]]) -> list[Norms]:
    """L2 norms, without waiting for an accelerator; those of one device together.

    Args:
        tensors: Each with an index; what has no norm (see :func:`plain`) is left out.
    """
    small: list[tuple[int, Tensor]] = []
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, tensor in tensors:
        values = plain(tensor)
        if values is None:
            continue
        if values.dtype is torch.float32 and values.is_cpu and 0 < values.numel() <= _SMALL:
            small.append((index, values))
            continue
        if values.numel() == 0:
            values = values.new_zeros(1)
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        groups.setdefault((values.device, wide), []).append((index, values))
    if len(small) < _MANY:
        groups.setdefault((_CPU, torch.float32), []).extend(small)
        small = []
    norms = [_norms_together(small)] if small else []
    return norms + [
        _norms_of_group(pairs, wide)
        for (device, wide), pairs in groups.items()
        if pairs and device.type != "meta"
    ]


def _norms_together(pairs: Sequence[tuple[int, Tensor]]) -> Norms:
    """Of small float32 tensors in CPU memory: one call for each would take longer than the work."""
    norms = []
    for start in range(0, len(pairs), _JOINED):
        tensors = [tensor for _, tensor in pairs[start : start + _JOINED]]
        starts = [0, *accumulate(tensor.numel() for tensor in tensors[:-1])]
        # PyTorch widens without the warning that NumPy gives of a signaling NaN.
        values = joined(tensors).to(torch.float64).numpy()
        norms.append(np.sqrt(np.add.reduceat(np.square(values, out=values), starts)))
    return _on_host([index for index, _ in pairs], torch.from_numpy(np.concatenate(norms)))


def _norms_of_group(pairs: Sequence[tuple[int, Tensor]], wide: torch.dtype) -> Norms:
    indices, tensors = zip(*pairs, strict=True)
    norms = torch.stack(norms_of(tensors, 2, wide))
    if norms.device.type != "cpu":
        norms = torch.stack([norms, torch.stack(norms_of(tensors, torch.inf, wide))])
        return Norms(indices=indices, values=norms)
    on_host = _on_host(indices, norms)
    if on_host.known_nonfinite and wide is torch.float32:
        # Squares beyond 3e38 overflow float32: an infinite norm need not mean infinite elements.
        return _norms_of_group(pairs, torch.float64)
    return on_host


def _on_host(indices: Sequence[int], norms: Tensor) -> Norms:
    # Python's sum: between two steps of training any other would not be in the core's cache.
    nonfinite = not math.isfinite(sum(norms.tolist()))
    return Norms(indices=tuple(indices), values=norms, known_nonfinite=nonfinite)

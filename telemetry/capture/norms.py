"""Norms of gradients, parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.capture.parameters import plain
from telemetry.host_copy import HostCopy
from telemetry.measure import native
from telemetry.torch_private import norms_of

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, eq=False)
class Norms:
    """Norms of some tensors of one device, on that device.

    Attributes:
        indices: Which tensors.
        values: Their L2 norms ``[k]``; on an accelerator a second row ``[2, k]`` with the largest
            magnitudes, which stay finite where the sum of squares overflows float32.
        known_square: Square of the norm of all together, where it is known without waiting.
    """

    indices: tuple[int, ...]
    values: Tensor
    known_square: float | None = None

    @property
    def known_nonfinite(self) -> bool:
        """Whether an element is not finite, as far as known without waiting."""
        return self.known_square is not None and not math.isfinite(self.known_square)

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
            largest_known=values.dim() == 2,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class NormReading:
    """:class:`Norms`, perhaps still on their way to the host; ``wait`` gives the values."""

    indices: tuple[int, ...]
    wait: Callable[[], Tensor]
    largest_known: bool

    @property
    def norms(self) -> NDArray[np.float64]:
        """Norms, float64 ``[k]``."""
        values = self._values()
        return values[0] if self.largest_known else values

    def read(self) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
        """The same, and whether all elements were finite, ``[k]``."""
        values = self._values()
        rows = values if self.largest_known else (values, values)
        return rows[0], np.isfinite(rows[1])

    def _values(self) -> NDArray[np.float64]:
        values = self.wait()
        # Not to be asked to do nothing: that takes as long as all else here.
        return (values if values.dtype is torch.float64 else values.to(torch.float64)).numpy()


def take_norms(tensors: Iterable[tuple[int, Tensor]]) -> list[Norms]:
    """L2 norms, without waiting for an accelerator; those of one device together.

    Args:
        tensors: Each with an index; what has no norm (see :func:`plain`) is left out.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
    for index, tensor in tensors:
        values = plain(tensor)
        if values is None or values.device.type == "meta":
            continue
        if values.is_cpu and values.dtype in native.DTYPES:
            groups.setdefault((_CPU, torch.float64), []).append((index, values.contiguous()))
            continue
        if values.numel() == 0:
            values = values.new_zeros(1)
        wide = torch.float64 if values.dtype is torch.float64 else torch.float32
        groups.setdefault((values.device, wide), []).append((index, values))
    return [_norms_of_group(pairs, wide) for (_, wide), pairs in groups.items()]


def _norms_of_group(pairs: Sequence[tuple[int, Tensor]], wide: torch.dtype) -> Norms:
    indices, tensors = zip(*pairs, strict=True)
    if tensors[0].is_cpu and native.DTYPES:
        squares = native.squared_norms(tensors)
        norms = torch.from_numpy(np.sqrt(squares))
        return Norms(indices=indices, values=norms, known_square=float(squares.sum()))
    norms = torch.stack(norms_of(tensors, 2, wide))
    if norms.device.type != "cpu":
        norms = torch.stack([norms, torch.stack(norms_of(tensors, torch.inf, wide))])
        return Norms(indices=indices, values=norms)
    square = sum(norm * norm for norm in norms.tolist())
    if wide is torch.float32 and not math.isfinite(square):
        # Squares beyond 3e38 overflow float32: an infinite norm need not mean infinite elements.
        return _norms_of_group(pairs, torch.float64)
    return Norms(indices=indices, values=norms, known_square=square)

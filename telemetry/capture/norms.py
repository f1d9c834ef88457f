"""Norms of tensors, and how far one optimizer step moves each parameter, relative to its size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from telemetry.capture.parameters import plain
from telemetry.measure import block_sample, compare_sample, copy_sample, native
from telemetry.torch_private import norms_of
from telemetry.torch_private.host_copy import HostCopy

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


class UpdateProbe:
    """``||after − before|| / ||before||`` of each parameter.

    Of large parameters over a fixed sample, see :func:`~telemetry.measure.block_sample`: within 2 %
    of the full ratio where all elements move alike.

    Args:
        parameters: Each with an index.
    """

    def __init__(self, parameters: Sequence[tuple[int, Tensor]]) -> None:
        self._on_host: list[tuple[int, Tensor, bytearray]] = []
        self._others: list[tuple[int, Tensor, Tensor]] = []
        for index, parameter in parameters:
            values = plain(parameter)
            if values is None or values.numel() == 0:
                continue
            copy = copy_sample(values)
            if copy is not None:
                self._on_host.append((index, parameter, copy))
            else:
                self._others.append((index, parameter, block_sample(values).clone()))

    def read(self) -> list[UpdateReading]:
        """Compare with the parameters as they are now; to be called once."""
        return [*self._read_on_host(), *self._read_others()]

    def _read_on_host(self) -> Iterator[UpdateReading]:
        squares = {}
        while self._on_host:
            index, parameter, before = self._on_host.pop()
            after = plain(parameter)
            found = None if after is None else compare_sample(after, before)
            if found is not None:
                squares[index] = found
        if squares:
            norms = np.sqrt(np.array([*squares.values()])).T
            yield UpdateReading(indices=tuple(squares), norms=lambda: norms)

    def _read_others(self) -> list[UpdateReading]:
        moved: list[tuple[int, Tensor]] = []
        sizes: list[tuple[int, Tensor]] = []
        while self._others:
            index, parameter, before = self._others.pop()
            values = plain(parameter)
            after = None if values is None else block_sample(values)
            if after is not None and after.shape == before.shape:
                moved.append((index, after - before))
                sizes.append((index, before))
        readings = [[group.sent() for group in take_norms(which)] for which in (moved, sizes)]
        return [
            UpdateReading(indices=m.indices, norms=partial(_both, m, b))
            for m, b in zip(*readings, strict=True)
        ]


def _both(moved: NormReading, before: NormReading) -> Sequence[NDArray[np.float64]]:
    return moved.read()[0], before.read()[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdateReading:
    """Of some parameters, by index; perhaps still on their way to the host.

    ``norms`` gives those of their updates and of the parameters before them, ``[k]`` each.
    """

    indices: tuple[int, ...]
    norms: Callable[[], Sequence[NDArray[np.float64]]]

    def read(self) -> tuple[tuple[int, ...], NDArray[np.float64]]:
        """Indices and update ratios ``[k]``: inf if zeros moved, NaN if they stayed."""
        moved, before = self.norms()
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios: NDArray[np.float64] = moved / before
        return self.indices, ratios

"""How far one optimizer step moves each parameter, relative to its size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from telemetry.capture.norms import NormReading, take_norms
from telemetry.capture.parameters import plain
from telemetry.measure import block_sample, compare_sample, copy_sample


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

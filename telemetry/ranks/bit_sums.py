"""A cheap check whether tensors on several ranks are equal: the sums of their bits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from telemetry.host_copy import HostCopy

_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True, eq=False)
class BitSums:
    """Of some tensors of one device, the sums of their elements' bits read as whole numbers.

    They do not depend on the order of addition, so they are equal on different hardware, too.

    Attributes:
        indices: Which tensors.
        values: The sums, modulo 2**64, int64 ``[k]``, on their way to the host.
    """

    indices: tuple[int, ...]
    values: HostCopy

    def read(self) -> list[tuple[int, int]]:
        """Each tensor's index and sum."""
        return list(zip(self.indices, self.values.wait().tolist(), strict=True))


def bit_sums(tensors: Iterable[tuple[int, Tensor]]) -> list[BitSums]:
    """Sums of dense tensors of floating-point numbers, without waiting for an accelerator.

    Args:
        tensors: Each with an index.
    """
    groups: dict[torch.device, list[tuple[int, Tensor]]] = {}
    for index, tensor in tensors:
        bits = tensor.view(_WHOLE_NUMBERS[tensor.element_size()])
        groups.setdefault(tensor.device, []).append((index, bits.sum(dtype=torch.int64)))
    return [
        BitSums(
            indices=tuple(index for index, _ in pairs),
            values=HostCopy(torch.stack([value for _, value in pairs])),
        )
        for pairs in groups.values()
    ]

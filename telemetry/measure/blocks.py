"""Memory for what is kept of a step's tensors until it is reduced: bounded, and used again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from telemetry.measure.moments import FloatArray, FloatType

BLOCK_BYTES = 1 << 20

Block = NDArray[np.uint8]


class BlockPool:
    """Lends blocks of memory, at most ``limit`` at a time. Safe to use from several threads."""

    def __init__(self, limit: int) -> None:
        self._unallocated = deque(range(limit))
        self._free: deque[Block] = deque()

    def take(self) -> Block | None:
        """A block of 1 MiB with anything in it; None if all are lent."""
        try:
            return self._free.pop()
        except IndexError:
            pass
        try:
            self._unallocated.pop()
        except IndexError:
            return None
        return np.empty(BLOCK_BYTES, np.uint8)

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Blocks from here that nobody uses any more."""
        self._free.extend(blocks)


class Arena:
    """The blocks that one step uses."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._blocks: list[Block] = []
        self._rest: dict[FloatType, FloatArray] = {}

    def take(self, count: int, dtype: FloatType) -> FloatArray | None:
        """``count`` elements, at most a block's worth, 1-D; None if there is no memory left."""
        rest = self._rest.get(dtype)
        if rest is None or rest.size < count:
            block = self._pool.take()
            if block is None:
                return None
            self._blocks.append(block)
            rest = block.view(dtype)
        self._rest[dtype] = rest[count:]
        return rest[:count]

    def release(self) -> None:
        """Give all blocks back; nothing in them may be used any more."""
        blocks, self._blocks = self._blocks, []
        self._pool.give_back(blocks)

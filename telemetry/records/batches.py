"""Batches of the last steps, by the ids that the user gave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from telemetry.plain_text import printable

BatchId: TypeAlias = int | str

MAX_IDS = 4096  # of one batch
_MAX_KEPT = 32 * MAX_IDS  # a loss burst is found up to 30 steps later
_MAX_CALLS = 2048
_SHOWN, _WIDTH = 8, 64


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Batch of one step on one rank."""

    step: int
    rank: int = 0
    ids: tuple[BatchId, ...] = ()  # of all micro-batches; empty if the user gave none

    def __str__(self) -> str:
        """Return step, rank and the first ids, for messages."""
        of_rank = f" of rank {self.rank}" if self.rank else ""
        more = f" and {len(self.ids) - _SHOWN:,} more" if len(self.ids) > _SHOWN else ""
        shown = ", ".join([printable(str(batch_id)[:_WIDTH]) for batch_id in self.ids[:_SHOWN]])
        return f"Batch of step {self.step}{of_rank}: {shown}{more}"


class RecentBatches:
    """The latest 2,048 batches, with 131,072 ids at most."""

    def __init__(self) -> None:
        self._kept: deque[Batch] = deque()
        self._ids = 0

    def add(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            self._kept.append(batch)
            self._ids += len(batch.ids)
        while self._ids > _MAX_KEPT or len(self._kept) > _MAX_CALLS:
            self._ids -= len(self._kept.popleft().ids)

    def of(self, step: int) -> tuple[Batch, ...]:
        """Return the batch of each rank that gave ids for the step, by rank."""
        ids: dict[int, list[BatchId]] = {}
        for batch in self._kept:
            if batch.step == step:
                ids.setdefault(batch.rank, []).extend(batch.ids)
        return tuple([Batch(step=step, rank=rank, ids=tuple(ids[rank])) for rank in sorted(ids)])

    def clear(self) -> None:
        self._kept.clear()
        self._ids = 0

"""Records that were merged of several ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from telemetry import StepRecord
from telemetry.records import Divergence, RankFacts, Spread


def of_ranks(
    record: StepRecord,
    size: int = 2,
    *,
    diverged: Collection[str] = (),
    declared: bool = True,
    same_batch: Collection[int] = (),
    usage: Mapping[str, tuple[float, int, float, int]] | None = None,
) -> StepRecord:
    """Return a full record of all ranks.

    Args:
        diverged: Parameters of which rank 1 has another value than rank 0.
        declared: Whether these are known as copies.
        usage: Lowest value and its rank, and highest value and its rank.
    """
    everyone = frozenset(range(size))
    found = [Divergence(parameter=name, rank=1, other=0, declared=declared) for name in diverged]
    facts = RankFacts(
        size=size,
        held=everyone,
        measured=everyone,
        diverged=tuple(found),
        same_batch=frozenset(same_batch),
        usage={
            tag: Spread(low=low, low_rank=low_rank, high=high, high_rank=high_rank)
            for tag, (low, low_rank, high, high_rank) in (usage or {}).items()
        },
    )
    return replace(record, full=True, ranks=facts)

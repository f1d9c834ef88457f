"""Curves that only several ranks have: who is the slowest, and how far what they log is apart."""

from __future__ import annotations

from collections.abc import Iterator

from telemetry.events import summaries
from telemetry.records import RankFacts
from telemetry.tag_names import RUN, plain


def values_of(facts: RankFacts) -> Iterator[bytes]:
    """``rank_time/slowest``, in seconds from step to step, and ``rank_spread/<tag>/...``.

    Nothing of a tag of which all ranks have the same number, or which one alone has logged.
    """
    if facts.step_s is not None:
        yield summaries.scalar(f"{RUN}rank_time/slowest", facts.step_s.high)
        yield summaries.scalar(f"{RUN}rank_time/slowest_rank", facts.step_s.high_rank)
    for tag, spread in facts.scalars.items():
        if spread.low_rank != spread.high_rank:
            prefix = f"{RUN}rank_spread/{plain(tag)}"
            yield summaries.scalar(f"{prefix}/min", spread.low)
            yield summaries.scalar(f"{prefix}/min_rank", spread.low_rank)
            yield summaries.scalar(f"{prefix}/max", spread.high)
            yield summaries.scalar(f"{prefix}/max_rank", spread.high_rank)

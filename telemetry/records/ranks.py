"""Facts of a merged record: how far ranks are apart, and which ones differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from telemetry.records.tensor import Output


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest and largest value over ranks, without NaN, and the lowest rank with each."""

    low: float
    low_rank: int
    high: float
    high_rank: int


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A parameter that should be equal on several ranks and is not.

    Attributes:
        rank, other: Lowest rank whose parameter differs, and a rank of the majority.
        declared: Whether a ``DTensor`` or DDP declares them as copies; else only the name is equal.
    """

    parameter: str
    rank: int
    other: int
    declared: bool = True


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """Facts of a merged record of several ranks.

    Attributes:
        size: Number of ranks that train together.
        held: Ranks that are merged in this record.
        measured: Ranks for which it is a full step.
        hosts: Known names of the ranks' hosts.
        scalars: Spread of logged scalars.
        step_s: Spread of the seconds since the step before; None if unknown.
        activation_rms: Spread of each module's activation RMS.
        activation_grad_rms: Spread of its gradient's RMS.
        diverged: Parameters that differ; at full steps.
        same_batch: Largest group of ranks that received the same batch, though each should receive
            another one; empty if unknown.
        nonfinite: Number of ranks with NaN or infinity that no collective has spread: in their
            loss, outputs or parameters.
        first_nonfinite: Lowest of these ranks, and the location as a text.
        not_known: Tensors of which each rank has an addend of an unknown sum.
    """

    size: int
    held: frozenset[int]
    measured: frozenset[int] = frozenset()
    hosts: Mapping[int, str] = field(default_factory=dict)
    scalars: Mapping[str, Spread] = field(default_factory=dict)
    step_s: Spread | None = None
    activation_rms: Mapping[Output, Spread] = field(default_factory=dict)
    activation_grad_rms: Mapping[Output, Spread] = field(default_factory=dict)
    diverged: tuple[Divergence, ...] = ()
    same_batch: frozenset[int] = frozenset()
    nonfinite: int = 0
    first_nonfinite: tuple[int, str] | None = None
    not_known: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that are not merged in this record."""
        return tuple(sorted(set(range(self.size)) - self.held))

    def called(self, rank: int) -> str:
        """Return a rank with its host, for a message."""
        return f"rank {rank} ({self.hosts[rank]})" if rank in self.hosts else f"rank {rank}"

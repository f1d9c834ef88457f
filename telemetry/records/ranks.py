"""What only a record of several ranks shows: how far apart they are, and which differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from telemetry.records.tensor import Output


@dataclass(frozen=True, kw_only=True)
class Spread:
    """The smallest and largest other than NaN of what ranks have, and the lowest that has each."""

    low: float
    low_rank: int
    high: float
    high_rank: int


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A parameter that should be equal on several ranks and is not.

    Attributes:
        rank, other: The lowest rank whose parameter differs, and one that has what most have.
        declared: Whether a ``DTensor`` or DDP says that they are copies; else they may be anything
            of the same name.
    """

    parameter: str
    rank: int
    other: int
    declared: bool = True


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What only a record of several ranks shows.

    Attributes:
        size: How many ranks train together.
        held: Which of them this record holds.
        measured: Which of these measured the step in full.
        hosts: Names of the ranks' hosts, as far as known.
        scalars: Of what the user logged.
        step_s: Of the seconds from the step before to this one; None if not known.
        activation_rms: Of the root mean square of what each module returned on each rank.
        activation_grad_rms: Of that of its gradient.
        diverged: Parameters that differ; at full steps.
        same_batch: Most ranks that were given the same, though each should be given something else;
            one alone is no fault. Empty if that is not known.
        nonfinite: How many ranks hold NaN or infinity of their own: in their loss, their outputs or
            their parameters. What a collective has spread is not their own.
        first_nonfinite: The lowest of them, and where, in words.
        not_known: Tensors of which each rank holds an addend, so nothing is known of the sum.
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
        """Ranks whose measurements are not in the record."""
        return tuple(sorted(set(range(self.size)) - self.held))

    def called(self, rank: int) -> str:
        """A rank with its host, for a message."""
        return f"rank {rank} ({self.hosts[rank]})" if rank in self.hosts else f"rank {rank}"

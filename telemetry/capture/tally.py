"""Observations, and how often each thing was seen."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from telemetry.records import Output

Kind = Literal["inputs", "outputs", "output_grads", "grads", "weights"]
Name: TypeAlias = str | Output
"""A parameter's or module's name, or which output."""


class Observation(NamedTuple):
    """One measured tensor: what and whose it is, and its number in the measurer.

    ``scaled``: it has the factor of a ``GradScaler`` on it, if there is one.
    """

    kind: Kind
    name: Name
    measurement: int
    scaled: bool


@dataclass(kw_only=True, eq=False)
class Tally:
    """What was observed, and how often each tensor came by, measured or only counted."""

    observations: list[Observation] = field(default_factory=list)
    calls: Counter[tuple[Kind, Name]] = field(default_factory=Counter)

    def absorb(self, other: Tally) -> None:
        """Add what ``other`` holds."""
        self.observations += other.observations
        self.calls.update(other.calls)

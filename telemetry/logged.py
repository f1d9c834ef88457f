"""What the user logs, on its way to the file: scalars, which rules see, and ready values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from telemetry.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True, eq=False)
class LoggedScalars:
    """What the user logged at one step; tensors perhaps still on their way to the host."""

    step: int
    wall_time: float
    values: Mapping[str, float | HostCopy]


@dataclass(frozen=True, kw_only=True, eq=False)
class ReadyValues:
    """Values that are written as they are, and one that is written when the loss is known.

    Attributes:
        of_loss: Makes that one of the loss's tag.
    """

    step: int
    wall_time: float
    values: Sequence[bytes]
    of_loss: Callable[[str], bytes] | None = None

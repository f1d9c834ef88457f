"""Decides which optimizer steps are due for a full measurement.

A suspicious rule may ask for more steps, and :mod:`telemetry.budget` may postpone a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Schedule: TypeAlias = Callable[[int], bool]
"""Whether a step is measured in full. The answer must be the same on all ranks."""


def every(n: int) -> Schedule:
    """Steps 0, n, 2n, ...

    Raises:
        TypeError: ``n`` is not an ``int``.
        ValueError: ``n`` is below 1.
    """
    if not isinstance(n, int) or isinstance(n, bool):
        raise TypeError(f"HookLogger(every_n_steps={n!r}): must be an int")
    if n < 1:
        raise ValueError(f"HookLogger(every_n_steps={n}): must be at least 1")
    return lambda step: step % n == 0

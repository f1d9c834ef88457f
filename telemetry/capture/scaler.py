"""``GradScaler``: the factor of the gradients, and skipped steps.

No hook runs for a skipped step. But the scaler then shrinks its factor, so the factors at two steps
that were taken show how many were skipped in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from telemetry.torch_private import initial_scale, scaler_state
from telemetry.torch_private.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalerReading:
    """State of a scaler at one optimizer step; it may still be on its way to the host."""

    step: int
    scale: HostCopy
    growth_tracker: HostCopy
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    initial_scale: float | None
    found_inf: HostCopy | None  # of optimizers that skip steps by themselves, as fused ones do

    @property
    def factor(self) -> float:
        """Factor of the loss, and so of all gradients of the step's backward passes."""
        return float(self.scale.wait())

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was called but left the parameters as they are."""
        return self.found_inf is not None and bool(self.found_inf.wait())


class PassEnd(NamedTuple):
    """End of a backward pass, with a gradient that may be NaN or infinite."""

    flag: bool | HostCopy  # whether one is; it may still be on its way to the host
    observations: int  # of the step, up to this end

    @property
    def is_overflown(self) -> bool:
        return bool(self.flag.wait()) if isinstance(self.flag, HostCopy) else self.flag


def read_scaler(scaler: GradScaler, optimizer: Optimizer, step: int) -> ScalerReading | None:
    """Read the scaler that is calling ``optimizer.step()``; None where it cannot be read."""
    state = scaler_state(scaler)
    if state is None:
        return None
    scale, tracker = state
    found_inf = getattr(optimizer, "found_inf", None)
    return ScalerReading(
        step=step,
        scale=HostCopy(scale),
        growth_tracker=HostCopy(tracker),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        initial_scale=initial_scale(scaler),
        found_inf=HostCopy(found_inf) if found_inf is not None else None,
    )


class SkippedSteps:
    """Number of skipped steps up to now; the worker counts them in the order of the steps."""

    def __init__(self) -> None:
        self._skipped = 0
        self._expected: tuple[int, float] | None = None  # the next step, and its factor

    def after(self, reading: ScalerReading, *, overflown_passes: int) -> int:
        """Return the number after a step that was taken.

        No step counts as skipped where the reading before is missing.

        Args:
            reading: State of the scaler at the step that was just taken.
            overflown_passes: Upper limit for the first reading: backward passes before it that
                did not lead to a step.
        """
        scale, tracker = reading.factor, int(reading.growth_tracker.wait())
        if self._expected is None and reading.initial_scale is not None:
            self._skipped += min(overflown_passes, _times_shrunk(reading, reading.initial_scale))
        elif self._expected is not None and self._expected[0] == reading.step:
            self._skipped += _times_shrunk(reading, self._expected[1])
        if reading.skipped:
            after = scale * reading.backoff_factor
        elif tracker + 1 == reading.growth_interval:
            after = scale * reading.growth_factor
        else:
            after = scale
        # A step that a fused optimizer skips counts as a step, too: its hooks run.
        self._expected = reading.step + 1, after
        self._skipped += reading.skipped
        return self._skipped


def _times_shrunk(reading: ScalerReading, expected: float) -> int:
    """Return how often a scaler backed off between the expected factor and its own."""
    shrunk = expected / reading.factor if reading.factor > 0 else math.inf
    if not 1 < shrunk < math.inf:
        return 0
    return round(math.log(shrunk, 1 / reading.backoff_factor))

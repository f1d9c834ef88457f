"""GradScaler: the factor that is on the gradients, and the steps that it skipped.

No hook runs for a step that is skipped. But the scaler then shrinks its factor, so the factors at
two steps that were taken show how many were skipped in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from telemetry.torch_private import initial_scale, scaler_state
from telemetry.torch_private.host_copy import HostCopy


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalerReading:
    """A scaler at one optimizer step, perhaps still on its way to the host."""

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
        """On the loss, and so on all gradients of the step's backward passes."""
        return float(self.scale.wait())

    @property
    def skipped(self) -> bool:
        """Whether the optimizer was called but left the parameters as they are."""
        return self.found_inf is not None and bool(self.found_inf.wait())


def read_scaler(scaler: GradScaler, optimizer: Optimizer, step: int) -> ScalerReading | None:
    """The scaler that is calling ``optimizer.step()``; None where it cannot be read."""
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
    """Counts skipped steps from one reading to the next; call it once a step, in order."""

    def __init__(self) -> None:
        self._total = 0
        self._expected: tuple[int, float] | None = None

    def __call__(self, reading: ScalerReading, *, overflown_passes: int = 0) -> int:
        """Steps skipped so far; none are counted where a reading between is missing.

        Args:
            reading: Of the step that was just taken.
            overflown_passes: For the first reading, the most that can have been skipped: backward
                passes before it that led to none.
        """
        scale, tracker = reading.factor, int(reading.growth_tracker.wait())
        if self._expected is None and reading.initial_scale is not None:
            self._total += min(overflown_passes, _times_shrunk(reading, reading.initial_scale))
        elif self._expected is not None and self._expected[0] == reading.step:
            self._total += _times_shrunk(reading, self._expected[1])
        if reading.skipped:
            after = scale * reading.backoff_factor
        elif tracker + 1 == reading.growth_interval:
            after = scale * reading.growth_factor
        else:
            after = scale
        # A step that a fused optimizer skipped was called, so it was counted as one.
        self._expected = reading.step + 1, after
        self._total += reading.skipped
        return self._total


def _times_shrunk(reading: ScalerReading, expected: float) -> int:
    """How often a scaler backed off to come from the expected factor to the one that was read."""
    shrunk = expected / reading.factor if reading.factor > 0 else math.inf
    if not 1 < shrunk < math.inf:
        return 0
    return round(math.log(shrunk, 1 / reading.backoff_factor))

"""GradScaler: the factor that is on the gradients, and the steps that it skipped.

No hook runs for a step that is skipped. But the scaler shrinks its factor then, so the factors seen
at two steps that did happen tell how many were skipped in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from telemetry.host_copy import HostCopy
from telemetry.torch_private import scaler_state


@dataclass(frozen=True, kw_only=True, eq=False)
class ScalerReading:
    """A scaler at one optimizer step, perhaps still on its way to the host.

    ``in_gradients`` says that the optimizer unscales by itself (fused ones do), so the gradients
    that it was given still have the factor on them; ``found_inf`` is then non-zero if it skipped.
    """

    step: int
    scale: HostCopy
    growth_tracker: HostCopy
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    in_gradients: bool
    found_inf: HostCopy | None

    @property
    def factor(self) -> float:
        """The factor on the loss and so on all gradients of the step's backward passes."""
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
        in_gradients=getattr(optimizer, "grad_scale", None) is not None,
        found_inf=HostCopy(found_inf) if found_inf is not None else None,
    )


class SkippedSteps:
    """Counts skipped steps from one reading to the next; call it once a step, in order."""

    def __init__(self) -> None:
        self._total = 0
        self._expected: tuple[int, float] | None = None

    def __call__(self, reading: ScalerReading) -> int:
        """Steps skipped so far; none are counted where a reading between is missing."""
        scale, tracker = reading.factor, int(reading.growth_tracker.wait())
        if self._expected is not None and self._expected[0] == reading.step:
            shrunk = self._expected[1] / scale if scale > 0 else math.inf
            if shrunk > 1 and math.isfinite(shrunk):
                self._total += round(math.log(shrunk, 1 / reading.backoff_factor))
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

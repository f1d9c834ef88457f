"""Steps without a measurement, and detectors with scripted findings."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from telemetry import Baseline, Detector, Finding, StepRecord
from tests.helpers.known_runs import layout_of


def record(step: int, *, norms: Sequence[float] = (1.0,), **known: Any) -> StepRecord:
    """Return a light step of as many layers, named 0, 1, ..., as there are gradient norms."""
    count = len(norms)
    values: dict[str, Any] = {
        "step": step,
        "wall_time": 0.0,
        "layout": layout_of([str(layer) for layer in range(count)]),
        "grad_norms": np.array(norms),
        "grad_present": np.ones(count, bool),
        "grad_finite": np.ones(count, bool),
    }
    return StepRecord(**values | known)


def finding(**known: Any) -> Finding:
    return Finding(
        **{"summary": "Seen", "advice": ("Advice",), "value": 1.0, "threshold": 0.0, **known}
    )


def at(*steps: int, **known: Any) -> dict[int, Finding]:
    """The same at each of these steps."""
    return {step: finding(**known) for step in steps}


class Scripted(Detector):
    """Detector with scripted findings.

    Args:
        found: By step.
        lasts_at: Steps at which the fault is still present although nothing is found.
        others: Attributes of a detector: its kind, its severity, ...
    """

    kind = "scripted"

    def __init__(
        self, found: Mapping[int, Finding], *, lasts_at: Collection[int] = (), **others: Any
    ) -> None:
        super().__init__()
        self.found, self.lasts_at = found, lasts_at
        for name, value in others.items():
            setattr(self, name, value)

    def find(self, record: StepRecord, baseline: Baseline) -> Finding | None:
        return self.found.get(record.step)

    def still_present(self, record: StepRecord, baseline: Baseline) -> bool:
        return record.step in self.lasts_at

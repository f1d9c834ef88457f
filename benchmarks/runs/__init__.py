"""Real training runs of families that the shared benches lack, about half of them with a fault."""

from __future__ import annotations

from runs import (  # noqa: F401
    decoder,
    drifting,
    experts,
    faulty,
    fields,
    further,
    further_faulty,
    fused_attention,
    healthy,
    logged_after,
    low_precision,
    methods,
    mistakes,
    odd_inputs,
    origins,
    resources,
    uncommon,
    unfamiliar,
    unseen,
)
from runs.labels import LABELS, Label
from runs.training import RUNS, Log

__all__ = ["LABELS", "RUNS", "Label", "Log"]

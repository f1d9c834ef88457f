"""Values that were measured at one training step."""

from telemetry.records.moments import once
from telemetry.records.step import (
    CodeLocation,
    Divergence,
    Layout,
    Module,
    Parameter,
    RankFacts,
    Spread,
    StepRecord,
)
from telemetry.records.tensor import Output, TensorRecord

__all__ = [
    "CodeLocation",
    "Divergence",
    "Layout",
    "Module",
    "Output",
    "Parameter",
    "RankFacts",
    "Spread",
    "StepRecord",
    "TensorRecord",
    "once",
]

"""Values that were measured at one training step."""

from telemetry.records.moments import once
from telemetry.records.ranks import Divergence, RankFacts, Spread
from telemetry.records.step import CodeLocation, Layout, Module, Parameter, StepRecord
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

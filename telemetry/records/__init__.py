"""Values: what was measured at one training step."""

from telemetry.records.ranks import Divergence, RankFacts, Spread
from telemetry.records.step import Layout, Module, Parameter, StepRecord, once
from telemetry.records.tensor import Output, TensorRecord

__all__ = [
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

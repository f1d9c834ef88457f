"""Values: what was measured at one training step."""

from telemetry.records.bounds import ABSENT, Bounds
from telemetry.records.layout import Layout, Module, Parameter
from telemetry.records.light import LightSteps
from telemetry.records.ranks import Divergence, RankFacts, Spread
from telemetry.records.step import StepRecord, once
from telemetry.records.tensor import Output, TensorRecord

__all__ = [
    "ABSENT",
    "Bounds",
    "Divergence",
    "Layout",
    "LightSteps",
    "Module",
    "Output",
    "Parameter",
    "RankFacts",
    "Spread",
    "StepRecord",
    "TensorRecord",
    "once",
]

"""Values: what was measured at one training step."""

import warnings

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


def __getattr__(name: str) -> object:
    """Names that only rules had a use for when they passed over steps: for one more release."""
    if name not in ("Bounds", "LightSteps"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    message = f"telemetry.records.{name} is gone: rules are asked about each step"
    warnings.warn(message, DeprecationWarning, stacklevel=2)
    return object

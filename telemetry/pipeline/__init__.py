"""Pipeline from the training thread to rules and files: queue, processor, schedule."""

from telemetry.pipeline.processing import Item, LoggedScalars, Processor, ReadyValues
from telemetry.pipeline.queue import CLOSE_TIMEOUT_S, Pipeline
from telemetry.pipeline.schedule import FullSteps, LightSteps

__all__ = [
    "CLOSE_TIMEOUT_S",
    "FullSteps",
    "Item",
    "LightSteps",
    "LoggedScalars",
    "Pipeline",
    "Processor",
    "ReadyValues",
]

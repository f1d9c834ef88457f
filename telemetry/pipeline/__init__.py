"""Pipeline from the training thread to rules and files: queue, processor, judge."""

from telemetry.pipeline.processing import LoggedScalars as LoggedScalars
from telemetry.pipeline.processing import Processor as Processor
from telemetry.pipeline.queue import CLOSE_TIMEOUT_S as CLOSE_TIMEOUT_S
from telemetry.pipeline.queue import Pipeline as Pipeline

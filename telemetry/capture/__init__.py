"""Hooks on a model and on its optimizers: what happens in training, as one value per step."""

from telemetry.capture.capture import Capture
from telemetry.capture.captured import CapturedStep
from telemetry.capture.watch import Content

__all__ = ["Capture", "CapturedStep", "Content"]

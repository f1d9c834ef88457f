"""Hooks on a model and on its optimizers: what happens in training, as one value per step."""

from telemetry.capture.capture import Capture, Content
from telemetry.capture.captured import CapturedStep

__all__ = ["Capture", "CapturedStep", "Content"]

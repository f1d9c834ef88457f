"""Detectors by their kind, as a user names them in ``HookLogger(alerts={...})``."""

from __future__ import annotations

from telemetry import Detector
from telemetry.alerts.configuration import DETECTORS


def rule(kind: str, **limits: float) -> Detector:
    """Return a new detector of this kind."""
    return DETECTORS[kind](**limits)

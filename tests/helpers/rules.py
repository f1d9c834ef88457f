"""Rules as a user configures them with ``HookLogger(alerts={...})``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from telemetry import Detector, Rule
from telemetry.alerts.configuration import DETECTORS, rules_from

KINDS = tuple(DETECTORS)


def rule(kind: str, **limits: float) -> Detector:
    """Return a new detector of this kind."""
    return DETECTORS[kind](**limits)


def default_rule(settings: Mapping[str, Any] | None = None) -> Rule:
    """Return the rule that applies all detectors, with a logger's settings."""
    [combined] = rules_from(settings or {})
    return combined


def combined(*detectors: Detector) -> Rule:
    """Return the rule that applies these detectors alone and reports root causes."""
    return default_rule(dict.fromkeys(KINDS) | {each.kind: each for each in detectors})

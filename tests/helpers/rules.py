"""Rules as a user configures them with ``HookLogger(alerts={...})``."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import is_dataclass
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


def differences(one: Any, other: Any, path: str = "") -> list[str]:
    """Return where two objects and the objects in their attributes differ."""
    if isinstance(one, dict):
        one, other = [*one.items()], [*other.items()]
    if isinstance(one, list | tuple | deque) and len(one) == len(other):
        items = zip(one, other, strict=True)
        return [at for i, pair in enumerate(items) for at in differences(*pair, f"{path}[{i}]")]
    is_value = is_dataclass(one) and not isinstance(one, Detector)
    if not hasattr(one, "__dict__") or isinstance(one, type) or is_value:
        return [] if repr(one) == repr(other) else [path]
    names = sorted(vars(one).keys() | vars(other).keys())  # of others, the class has the value
    pairs = [(getattr(one, name), getattr(other, name), f"{path}.{name}") for name in names]
    return [at for pair in pairs for at in differences(*pair)]

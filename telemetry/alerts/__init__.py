"""Rules: what a training fault looks like in the records, one file for each."""

from __future__ import annotations

from telemetry.alerts.exploding_gradient import ExplodingGradient
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.records import Rule

__all__ = ["default_rules"]


def default_rules() -> tuple[Rule, ...]:
    """The rules that watch every run unless told otherwise; new ones, which have seen nothing."""
    return (Nonfinite(), ExplodingGradient(), VanishingGradient())

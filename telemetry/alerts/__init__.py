"""Rules: what a training fault looks like in the records, one file for each."""

from __future__ import annotations

from telemetry.alerts.causes import OneCause
from telemetry.alerts.dead_units import DeadUnits
from telemetry.alerts.exploding_activation import ExplodingActivation
from telemetry.alerts.exploding_gradient import ExplodingGradient
from telemetry.alerts.loss_divergence import LossDivergence
from telemetry.alerts.no_learning import NoLearning
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.alerts.saturated_units import SaturatedUnits
from telemetry.alerts.suspicion import Suspicion
from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.records import Rule

__all__ = ["default_rules"]


def default_rules() -> tuple[Rule, ...]:
    """The rules that watch every run unless told otherwise; new ones, which have seen nothing."""
    return (
        OneCause(
            [
                LossDivergence(),
                SaturatedUnits(),
                ExplodingGradient(),
                ExplodingActivation(),
                DeadUnits(),
                VanishingGradient(),
                Nonfinite(),
                NoLearning(),
                Suspicion(),
            ]
        ),
    )

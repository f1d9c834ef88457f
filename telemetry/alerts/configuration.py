"""Default rules by name, with parameters that the user may set."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any, get_args

from telemetry.alert import Severity
from telemetry.alerts import (
    exploding,
    inactive_units,
    losses,
    mistakes,
    no_learning,
    nonfinite,
    outputs,
    ranks_diverge,
    resources,
    vanishing_gradient,
    weights,
)
from telemetry.alerts.detector import Detector
from telemetry.alerts.engine import Engine
from telemetry.plain_text import closest
from telemetry.rule import Rule

Settings = Mapping[str, "float | str"]
"""Parameters of one rule by name, and ``severity``."""

_KINDS: tuple[type[Detector], ...] = (
    losses.LossDivergence, exploding.ExplodingActivation, exploding.ExplodingGradient,
    inactive_units.DeadUnits, inactive_units.SaturatedUnits, losses.LossSpike,
    losses.UnboundedLoss, mistakes.EvalMode, mistakes.SameBatch, mistakes.WrongLossInput,
    no_learning.LearningRateZero, no_learning.LossStuck,
    no_learning.NoLearning, no_learning.UntrainedParameters, nonfinite.Nonfinite,
    outputs.AttentionCollapse, outputs.ExpertCollapse,
    outputs.OutputCollapse, ranks_diverge.RanksDiverge, ranks_diverge.RanksSameBatch,
    resources.InputBound, resources.MemoryGrowth,
    vanishing_gradient.VanishingGradient, weights.ExponentialTrend, weights.LayersNotLearning,
    weights.WeightJump,
)  # fmt: skip
DETECTORS: Mapping[str, type[Detector]] = {detector.kind: detector for detector in _KINDS}

# All kinds of alerts that the package reports.
KINDS: Mapping[str, type[Detector]] = {**DETECTORS, **mistakes.CHECK_KINDS}


def default_rules() -> tuple[Rule, ...]:
    """Return new instances of the default rules."""
    return rules_from({})


def rules_from(config: Mapping[str, Settings | Detector | None]) -> tuple[Rule, ...]:
    """Return the default rules with changes: other parameters, fewer or more rules.

    ::

        rules_from({"dead_units": {"fraction": 0.8, "severity": "error"}, "saturated_units": None})
        rules_from({"my_kind": MyDetector()})

    Args:
        config: For each rule's name its parameters, or None to omit the rule. The parameters are
            the keyword arguments of the rule's class, and ``severity`` for each rule. For the kind
            of a detector the detector itself: it follows the default ones, or replaces the one of
            its kind.

    Raises:
        TypeError: A rule's parameters are not a mapping, or a parameter is not a number.
        ValueError: A rule or parameter of that name does not exist, a number is not positive, a
            share is above 1, or a detector is of another kind.
    """
    for name, given in config.items():
        _check(name, given)
    detectors: list[Detector] = []
    severities: dict[str, Any] = {}
    for name in {**DETECTORS, **config}:
        given = config.get(name, {})
        if isinstance(given, Detector):
            detectors.append(given)
        elif given is not None:
            limits = dict[str, Any](given)
            if "severity" in limits:
                severities[name] = limits.pop("severity")
            detectors.append(DETECTORS[name](**limits))
    own = any(isinstance(given, Detector) for given in config.values())
    return (Engine(detectors, severities=severities, every_step=own),)


def _check(name: str, settings: Settings | Detector | None) -> None:
    given = f"HookLogger(alerts={{{name!r}: "
    if isinstance(settings, Detector):
        if settings.kind != name:
            raise ValueError(
                f"{given}{type(settings).__name__}()}}): its kind is {settings.kind!r}; that has "
                "to be the key"
            )
        return
    if isinstance(settings, type):
        called = settings.__name__
        raise TypeError(f"{given}{called}}}): is a class; pass an instance: {called}()")
    if name not in DETECTORS:
        raise ValueError(f"{given}...}}): no rule has this name; {closest(name, DETECTORS)}")
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        raise TypeError(
            f"{given}{settings!r}}}): must be a dict of parameters, a Detector of this kind, or "
            "None to omit the rule"
        )
    options = [*DETECTORS[name].limits(), "severity"]
    for parameter, value in settings.items():
        where = f"{given}{{{parameter!r}: {value!r}}}}})"
        if parameter not in options:
            raise ValueError(f"{where}: no parameter has this name; {closest(parameter, options)}")
        if parameter == "severity":
            if value not in get_args(Severity):
                raise ValueError(f"{where}: must be one of note, warning, error")
        elif not isinstance(value, Real) or isinstance(value, bool):
            raise TypeError(f"{where}: must be a number")
        elif not value > 0:
            raise ValueError(f"{where}: must be above 0")
        elif value > 1 and parameter.endswith(("fraction", "share")):
            raise ValueError(f"{where}: is a share, must be at most 1")

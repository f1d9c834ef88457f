"""See inside a PyTorch model while it trains.

Names are imported when they are first used, so that ``import telemetry`` and the parts that only
read or draw records do not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from telemetry.version import __version__ as __version__

if TYPE_CHECKING:
    from telemetry.alert import Alert as Alert
    from telemetry.alert import TelemetryAlert as TelemetryAlert
    from telemetry.alerts.baseline import Baseline as Baseline
    from telemetry.alerts.detector import Detector as Detector
    from telemetry.alerts.detector import Finding as Finding
    from telemetry.checking import CheckResult as CheckResult
    from telemetry.checking import check as check
    from telemetry.events.summary_writer import SummaryWriter as SummaryWriter
    from telemetry.interventions import clip_gradients as clip_gradients
    from telemetry.interventions import prune_activations as prune_activations
    from telemetry.interventions import scale_gradients as scale_gradients
    from telemetry.interventions import zero_gradients as zero_gradients
    from telemetry.measure.native import native as native
    from telemetry.reading.run import Run as Run
    from telemetry.reading.run import read as read
    from telemetry.records import Layout as Layout
    from telemetry.records import Module as Module
    from telemetry.records import Output as Output
    from telemetry.records import Parameter as Parameter
    from telemetry.records import StepRecord as StepRecord
    from telemetry.records import TensorRecord as TensorRecord
    from telemetry.records.sketch import Sketch as Sketch
    from telemetry.rule import Rule as Rule
    from telemetry.run.logger import HookLogger as HookLogger

_HOMES = {
    "Alert": "telemetry.alert",
    "Baseline": "telemetry.alerts.baseline",
    "CheckResult": "telemetry.checking",
    "Detector": "telemetry.alerts.detector",
    "Finding": "telemetry.alerts.detector",
    "HookLogger": "telemetry.run.logger",
    "Layout": "telemetry.records",
    "Module": "telemetry.records",
    "Output": "telemetry.records",
    "Parameter": "telemetry.records",
    "Run": "telemetry.reading.run",
    "Rule": "telemetry.rule",
    "Sketch": "telemetry.records.sketch",
    "StepRecord": "telemetry.records",
    "SummaryWriter": "telemetry.events.summary_writer",
    "TelemetryAlert": "telemetry.alert",
    "TensorRecord": "telemetry.records",
    "check": "telemetry.checking",
    "clip_gradients": "telemetry.interventions",
    "native": "telemetry.measure.cuda",
    "prune_activations": "telemetry.interventions",
    "read": "telemetry.reading.run",
    "scale_gradients": "telemetry.interventions",
    "zero_gradients": "telemetry.interventions",
}
__all__ = sorted({*_HOMES, "__version__"} - {"native"})


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        home = import_module(_HOMES[name])
    except AttributeError as error:  # Python would take it for "there is no such name"
        raise ImportError(f"cannot import {_HOMES[name]}: {error}", name=__name__) from error
    value: object = getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*_HOMES, "__version__"})

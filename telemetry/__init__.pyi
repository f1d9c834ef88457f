"""Public names; ``__init__.py`` reads them from here."""

from telemetry.alert import Alert as Alert
from telemetry.alert import TelemetryAlert as TelemetryAlert
from telemetry.alerts.baseline import Baseline as Baseline
from telemetry.alerts.detector import Detector as Detector
from telemetry.alerts.detector import Finding as Finding
from telemetry.alerts.detector import limit as limit
from telemetry.alerts.detector import state as state
from telemetry.checking import CheckResult as CheckResult
from telemetry.checking import check as check
from telemetry.interventions import clip_gradients as clip_gradients
from telemetry.interventions import prune_activations as prune_activations
from telemetry.interventions import scale_gradients as scale_gradients
from telemetry.interventions import zero_gradients as zero_gradients
from telemetry.measure.cuda import native as native
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
from telemetry.version import __version__ as __version__

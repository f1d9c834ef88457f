"""Values that were measured at one training step."""

from telemetry.records.moments import once as once
from telemetry.records.step import CodeLocation as CodeLocation
from telemetry.records.step import Divergence as Divergence
from telemetry.records.step import Layout as Layout
from telemetry.records.step import Module as Module
from telemetry.records.step import Parameter as Parameter
from telemetry.records.step import RankFacts as RankFacts
from telemetry.records.step import Spread as Spread
from telemetry.records.step import StepRecord as StepRecord
from telemetry.records.tensor import AttentionHeads as AttentionHeads
from telemetry.records.tensor import Output as Output
from telemetry.records.tensor import TensorRecord as TensorRecord

"""Statistics of layers; :mod:`telemetry.layers.table` has one entry for each."""

from telemetry.layers.table import MATRIX_STATISTICS as MATRIX_STATISTICS
from telemetry.layers.table import MISSING as MISSING
from telemetry.layers.table import OPTIONAL_STATISTICS as OPTIONAL_STATISTICS
from telemetry.layers.table import PAGE_STATISTICS as PAGE_STATISTICS
from telemetry.layers.table import PARAMETER_STATISTICS as PARAMETER_STATISTICS
from telemetry.layers.table import STATISTICS as STATISTICS
from telemetry.layers.table import Statistic as Statistic
from telemetry.layers.table import table as table

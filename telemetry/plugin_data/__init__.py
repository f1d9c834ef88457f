"""The data of the Telemetry page: written by the logger; read by the plugin, report and CLI."""

from telemetry.plugin_data.format import (
    PLUGIN_NAME,
    NewerFormatError,
    Statistic,
    new_session_id,
)
from telemetry.plugin_data.recorder import Recorder
from telemetry.plugin_data.statistics import STATISTICS

__all__ = [
    "PLUGIN_NAME",
    "STATISTICS",
    "NewerFormatError",
    "Recorder",
    "Statistic",
    "new_session_id",
]

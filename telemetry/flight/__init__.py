"""Flight recorder: the last steps before a fault, kept in memory and written to a file."""

from telemetry.flight.explaining import NO_FLIGHT, explanation_of
from telemetry.flight.file import flight_files, read_flight
from telemetry.flight.recorder import FlightRecorder

__all__ = [
    "NO_FLIGHT",
    "FlightRecorder",
    "explanation_of",
    "flight_files",
    "read_flight",
]

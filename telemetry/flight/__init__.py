"""Flight recorder: the last steps before a fault, kept in memory and written to a file."""

from telemetry.flight.explaining import explain
from telemetry.flight.file import flight_files, read_flight
from telemetry.flight.recorder import FlightRecorder

__all__ = ["FlightRecorder", "explain", "flight_files", "read_flight"]

"""The last steps before a fault: kept in memory, written to a file, explained in words."""

from telemetry.flight.explaining import explain
from telemetry.flight.file import flight_files, read_flight
from telemetry.flight.recorder import FlightRecorder

__all__ = ["FlightRecorder", "explain", "flight_files", "read_flight"]

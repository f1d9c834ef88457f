"""The last steps before something went wrong: kept in memory, written to a file, told in words."""

from telemetry.flight.explaining import explain
from telemetry.flight.file import flight_files, read_flight
from telemetry.flight.recorder import FlightRecorder

__all__ = ["FlightRecorder", "explain", "flight_files", "read_flight"]

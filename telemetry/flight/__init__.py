"""Flight recorder: the last steps before a fault, kept in memory and written to a file."""

from telemetry.flight.file import flight_files as flight_files
from telemetry.flight.file import read_flight as read_flight
from telemetry.flight.recorder import FlightRecorder as FlightRecorder
from telemetry.flight.recorder import is_fault as is_fault

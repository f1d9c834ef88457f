"""Event files, which TensorBoard shows: their values, writers and readers."""

from telemetry.events.file_writer import FileWriter
from telemetry.events.local_files import list_event_files
from telemetry.events.reading import CorruptEventFileError, EventReader, read_events

__all__ = [
    "CorruptEventFileError",
    "EventReader",
    "FileWriter",
    "list_event_files",
    "read_events",
]

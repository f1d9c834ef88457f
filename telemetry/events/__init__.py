"""Event files, which TensorBoard shows: their values, writers and readers."""

from telemetry.events.reading import CorruptEventFileError as CorruptEventFileError
from telemetry.events.reading import EventReader as EventReader
from telemetry.events.reading import list_event_files as list_event_files
from telemetry.events.reading import read_events as read_events

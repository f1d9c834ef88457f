"""What can still be written where there is no room for everything."""

from __future__ import annotations

import errno
import shutil
import tempfile

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def has_room(directory: str, size: int) -> bool:
    """Whether so many bytes find room: as far as is known, and if so by trying it.

    File systems do not tell of quotas, but nobody else should find a disk full for a moment only.
    """
    try:
        disk = shutil.disk_usage(directory)
        if disk.total and disk.free < size:  # some network drives say 0 of both
            return False
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            return probe.write(bytes(size)) == size
    except OSError as error:
        return error.errno not in NO_ROOM  # anything else is for the real write to find out


def tags_of(record: bytes) -> set[str]:
    return {value.tag for value in Event.FromString(record).summary.value}


def curves_apart(record: bytes) -> list[bytes]:
    """An event as two, if it holds points of curves and other values: the points come first.

    To readers it is the same: they know values by tag and step.
    """
    event = Event.FromString(record)
    points: list[Summary.Value] = []
    others: list[Summary.Value] = []
    for value in event.summary.value:
        (points if value.HasField("simple_value") else others).append(value)
    if not points or not others:
        return [record]
    return [_with_values(event, values) for values in (points, others)]


def _with_values(event: Event, values: list[Summary.Value]) -> bytes:
    part = Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=values))
    return bytes(part.SerializeToString())

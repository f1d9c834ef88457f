"""Finds out what still fits on a nearly full disk."""

from __future__ import annotations

import errno
import shutil
import tempfile

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def has_room(directory: str, size: int) -> bool:
    """Whether the directory's disk has room for ``size`` bytes, without and then with a trial.

    A trial is needed because file systems do not report quotas. The free space is checked first,
    so that the trial does not fill the disk for everybody else.
    """
    try:
        disk = shutil.disk_usage(directory)
        if disk.total and disk.free < size:  # some network drives report 0 for both
            return False
        with tempfile.TemporaryFile(dir=directory, buffering=0) as probe:
            return probe.write(bytes(size)) == size
    except OSError as error:
        return error.errno not in NO_ROOM  # the real write will report anything else


def tags_of(data: bytes) -> set[str]:
    return {value.tag for value in Event.FromString(data).summary.value}


def curves_apart(data: bytes) -> list[bytes]:
    """An event split into points of curves and other values; unsplit if it has only one kind.

    Readers do not notice, because they identify values by tag and step.
    """
    event = Event.FromString(data)
    points: list[Summary.Value] = []
    others: list[Summary.Value] = []
    for value in event.summary.value:
        (points if value.HasField("simple_value") else others).append(value)
    if not points or not others:
        return [data]
    return [_with_values(event, values) for values in (points, others)]


def _with_values(event: Event, values: list[Summary.Value]) -> bytes:
    part = Event(wall_time=event.wall_time, step=event.step, summary=Summary(value=values))
    return bytes(part.SerializeToString())

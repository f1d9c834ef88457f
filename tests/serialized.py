"""What the values of an event are, parsed."""

from __future__ import annotations

from collections.abc import Iterable

from tensorboard.compat.proto.summary_pb2 import Summary


def summary_of(values: Iterable[bytes]) -> Summary:
    return Summary.FromString(b"".join(values))


def parsed(value: bytes) -> Summary.Value:
    (only,) = summary_of([value]).value
    return only


def tags_of(values: Iterable[bytes]) -> set[str]:
    return {value.tag for value in summary_of(values).value}

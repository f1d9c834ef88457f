"""The serialized events that readers need in every event file of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_MAX_BYTES = 4 << 20


class Repeated:
    """The latest event of each tag; above 4 MiB the largest older ones are dropped.

    One thread may add events while another iterates.
    """

    def __init__(self) -> None:
        self._records: Mapping[str, bytes] = {}  # replaced, never modified

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records.values())

    def add(self, tag: str, event: bytes) -> None:
        kept = {known: older for known, older in self._records.items() if known != tag}
        while kept and sum(map(len, kept.values())) + len(event) > _MAX_BYTES:
            del kept[max(kept, key=lambda known: len(kept[known]))]
        self._records = {**kept, tag: event}

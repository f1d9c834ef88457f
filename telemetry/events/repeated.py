"""The records that every event file of a run needs, whatever happened to the earlier ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_MAX_BYTES = 4 << 20


class Repeated:
    """The latest record of each tag; of more than 4 MiB the newest and the smallest.

    One thread adds to it while another one iterates over it.
    """

    def __init__(self) -> None:
        self._records: Mapping[str, bytes] = {}  # replaced as a whole, never changed

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._records.values())

    def add(self, tag: str, record: bytes) -> None:
        kept = {known: older for known, older in self._records.items() if known != tag}
        while kept and sum(map(len, kept.values())) + len(record) > _MAX_BYTES:
            del kept[max(kept, key=lambda known: len(kept[known]))]
        self._records = {**kept, tag: record}

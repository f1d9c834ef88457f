from __future__ import annotations

from telemetry.events import file_writer
from telemetry.events.file_writer import _Repeated as Repeated


def test_the_latest_of_each_tag_is_kept_in_order() -> None:
    kept = Repeated()
    for tag, record in [("a", b"1"), ("b", b"2"), ("a", b"3")]:
        kept.add(tag, record)
    assert list(kept) == [b"2", b"3"]


def test_above_the_limit_the_newest_and_the_smallest_remain() -> None:
    kept = Repeated()
    third = file_writer._MAX_REPEATED_BYTES // 3
    kept.add("settings", b"small")
    for number in range(10):
        kept.add(f"layout/{number}", bytes([number]) * third)
    assert [record[:1] for record in kept] == [b"s", b"\x08", b"\x09"]

    kept.add("huge", bytes(2 * file_writer._MAX_REPEATED_BYTES))
    assert list(map(len, kept)) == [2 * file_writer._MAX_REPEATED_BYTES]

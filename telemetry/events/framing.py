"""The record format of event files (TFRecord): a length, the data, and a checksum of each."""

from __future__ import annotations

import struct

import google_crc32c

# Little-endian: uint64 length of the data, uint32 checksum of these 8 bytes, the data, uint32
# checksum of the data (tensorflow/core/lib/io/record_writer.h).
HEADER_BYTES = 12
FOOTER_BYTES = 4
_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


def frame(data: bytes) -> bytes:
    """One record as it stands in a file."""
    length = _LENGTH.pack(len(data))
    return b"".join((length, _checksum(length), data, _checksum(data)))


def data_length(header: bytes) -> int | None:
    """How many bytes of data follow these 12; None if the header is damaged."""
    length = header[: _LENGTH.size]
    if header[_LENGTH.size :] != _checksum(length):
        return None
    return int(_LENGTH.unpack(length)[0])


def is_intact(data: bytes, footer: bytes) -> bool:
    """Whether the data is what was written."""
    return footer == _checksum(data)


def _checksum(data: bytes) -> bytes:
    # Masked, so that the checksum of data that holds checksums stays a good one
    # (tensorflow/tsl/lib/hash/crc32c.h).
    crc = google_crc32c.value(data)
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

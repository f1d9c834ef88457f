"""Frames of event files (TFRecord format): a length, the data of one event, and checksums."""

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
    return b"".join((_header(len(data)), data, _checksum(data)))


def data_length(header: bytes) -> int | None:
    """Return the number of data bytes after a header of 12 bytes; None if it is damaged."""
    (length,) = _LENGTH.unpack_from(header)
    return length if header == _header(length) else None


def is_intact(data: bytes, footer: bytes) -> bool:
    return footer == _checksum(data)


def _header(length: int) -> bytes:
    packed = _LENGTH.pack(length)
    return packed + _checksum(packed)


def _checksum(data: bytes) -> bytes:
    # Masked, because the CRC of data that itself holds CRCs is weak
    # (tensorflow/tsl/lib/hash/crc32c.h).
    crc = google_crc32c.value(data)
    return _CHECKSUM.pack(((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

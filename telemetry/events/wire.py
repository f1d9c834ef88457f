"""Protocol buffers' wire format, for the messages of which a run writes thousands.

A message is the concatenation of its fields, and the concatenation of two messages is their merge.
Building a message, copying it into another and serializing that takes several times as long.
"""

from __future__ import annotations

from functools import lru_cache

_LAST = [bytes([bits]) for bits in range(128)]
_MORE_FOLLOWS = [bytes([bits | 128]) for bits in range(128)]


def varint(number: int) -> bytes:
    """An integer from 0 to 2^63 - 1, seven bits at a time."""
    if number < 128:
        return _LAST[number]
    return _MORE_FOLLOWS[number & 127] + varint(number >> 7)


@lru_cache(maxsize=4096)  # the fields of a run have few different lengths
def delimiter(number: int, length: int) -> bytes:
    """What stands before a field of bytes, text or a message: its number and its length."""
    return varint(number << 3 | 2) + varint(length)


def delimited(number: int, content: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return delimiter(number, len(content)) + content

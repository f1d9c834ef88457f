"""The C extension on memory whose end detects reads out of bounds.

Run by ``test_native.py`` on pages that are followed by one that must not be read, and as a program
with a build that has AddressSanitizer in it::

    python tests/native_cases.py EXTENSION

It needs NumPy only, and neither PyTorch nor the rest of telemetry.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import numpy as np

LETTERS = "?bB45hHiIqQefdE"
SIZES = (1, 2, 15, 16, 17, 63, 2047, 2048, 2049, 8191, 8193, 20_000)

Memory = Callable[[int], AbstractContextManager[int]]
"""Context of a number of bytes; yields their address."""

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes = (ctypes.c_size_t,)
libc.free.argtypes = (ctypes.c_void_p,)


@contextmanager
def on_the_heap(size: int) -> Iterator[int]:
    """Memory of exactly this size, known to the sanitizer."""
    address = libc.malloc(size)
    try:
        yield address
    finally:
        libc.free(address)


def item_size(letter: str) -> int:
    return {"E": 2, "4": 1, "5": 1}.get(letter) or np.dtype(letter).itemsize


def read_everything(native: ModuleType, memory: Memory) -> None:
    """Every dtype, sizes around those of blocks, layouts of units, samples, any bits."""
    random = np.random.default_rng(0)
    for letter in LETTERS:
        for count in SIZES:
            size = count * item_size(letter)
            bits = random.integers(0, 256, size, dtype=np.uint8)
            for offset in (0, 1, item_size(letter)):
                with memory(size + offset) as address:
                    ctypes.memmove(address + offset, bits.tobytes(), size)
                    read_in_every_way(native, address + offset, count, letter)


def read_in_every_way(native: ModuleType, address: int, count: int, letter: str) -> None:
    dtype = ord(letter)

    def measured(count: int, units: int, inner: int, step: int, powers: int) -> list[bytearray]:
        rows = [bytearray(), bytearray(), bytearray()]
        native.measure((address, count, dtype, units, inner, step, powers), *rows)
        return rows

    heads, pairs, units_of_all = measured(count, 0, 1, 0, 4)
    fewer, same, _ = measured(count, 0, 1, 0, 2)
    cubes = slice(72, 88)  # and fourth powers
    assert np.isnan(np.frombuffer(fewer[cubes])).all()
    fewer[cubes] = heads[cubes]
    assert (fewer, same, units_of_all) == (heads, pairs, b"")
    all_of_it, nan, positive_inf, negative_inf, zeros = np.frombuffer(heads, np.int64, 5)
    sampled, pair_count, unit_count = np.frombuffer(heads, np.int64, 3, 88)
    assert (all_of_it, sampled, pair_count, unit_count) == (count, -1, len(pairs) // 8, 0)
    finite = count - nan - positive_inf - negative_inf
    assert np.frombuffer(pairs, np.uint32)[::2].sum() == finite
    for units in {1, 3, 10, 100, count}:
        for inner in {1, 7, 64, count // units}:
            if inner and units * inner <= count:
                rows = count // (units * inner)
                assert len(measured(rows * units * inner, units, inner, 0, 4)[2]) == 8 * units
    for step in (16, 17, 1009):
        heads, pairs, _ = measured(count, 0, 1, step, 4)
        counts, buckets = np.frombuffer(pairs, np.uint32)[::2], np.frombuffer(pairs, np.int16)[2::4]
        exact = (buckets == 0) & (zeros > 0)  # the head counts these
        assert np.frombuffer(heads, np.int64, 1, 88) == counts[~exact].sum()
        assert (np.diff(buckets) > 0).all()
    (square,) = np.frombuffer(native.squared_norms([address], [count], letter.encode()))
    assert (square >= 0) | np.isnan(square)


if __name__ == "__main__":
    spec = spec_from_file_location("_native", sys.argv[1])
    extension = module_from_spec(spec)
    spec.loader.exec_module(extension)
    for instructions in extension.instructions():
        extension.use_instructions(instructions)
        read_everything(extension, on_the_heap)

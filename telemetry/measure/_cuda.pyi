"""Launches of the kernels of ``kernels.cu`` for :mod:`telemetry.measure.cuda`.

No function waits for a device, or launches on a captured stream. Streams are the driver's handles,
memory is given by address.

All raise ``RuntimeError`` if the driver returns an error, ``MemoryError`` if it lacks memory.
:func:`measure` and :func:`launch_table` keep the interpreter lock: getting it back may take longer.
"""

from typing import Any

class _Device: ...
class _Buffer: ...

def load(path: str | None, tensor_types: tuple[type, ...], exchange: object, /) -> None:
    """Load the driver; None: the system's.

    Args:
        tensor_types: Classes of tensors to read.
        exchange: Their ``__dlpack_c_exchange_api__``; None: tensors are described in Python.

    Raises:
        OSError: The driver or one of its functions is missing, or DLPack has another version.
    """

def open(index: int, images: tuple[bytes, ...], /) -> _Device:
    """Load the kernels for float32, for float16 and for bfloat16."""

def buffer(device: _Device, address: int, size: int, /) -> _Buffer:
    """Make a buffer of zeroed bytes on the device; the address is a multiple of 16."""

def measure(
    buffer: _Buffer, tensor: object, unit_axis: int | None, powers: int, stream: int, /
) -> int:
    """Queue the measurement of a tensor.

    Args:
        tensor: Or a tuple: address, number of elements, ``ord`` of the dtype's letter, units, and
            adjacent elements of a unit; 0 and 1 without units.

    Returns:
        1 if it has a row. 0 if no kernel takes it: another class, dtype or device, gaps, no
        elements, no such axis, or 2^31 elements. -1 if the buffer is full; nothing is queued then.
    """

def plan(
    device: _Device, buffer: _Buffer | None, tensors: list[Any], stream: int, /
) -> tuple[list[int], list[tuple[int, bytearray, int, int]]]:
    """Select the tensors that can be measured together, and reserve their rows, in order.

    Returns:
        For each tensor the result of :func:`measure`. Then for each dtype arguments of
        :func:`launch_table`: module, table to copy to the device, number of chunks, address of the
        partial sums. Without a buffer, rows are indices of the list.
    """

def launch_table(
    device: _Device,
    buffer: _Buffer | None,
    module: int,
    count: int,
    table: int,
    norms: int,
    partials: int,
    powers: int,
    stream: int,
    /,
) -> None:
    """Queue the measurement of a table of :func:`plan`.

    Without a buffer, compute norms: 24 zeroed bytes for each, 8 bytes of partial sums per chunk.
    """

def take(buffer: _Buffer, /) -> tuple[int, int, int, int]:
    """Return the numbers of rows and units, and the first and last byte of both in the buffer.

    The codes of units come before the rows: see ``compact`` of the other extension. The buffer is
    empty afterwards; the caller zeroes this range.
    """

"""Launches of the kernels of ``kernels.cu``; :mod:`telemetry.measure.cuda` says what for.

Nothing here waits for a device but :func:`wait`, and nothing is launched on a stream that is being
captured. Streams are the driver's handles, memory is given by address.

All raise ``RuntimeError`` where the driver returns an error, ``MemoryError`` if it lacks memory.
:func:`measure` and :func:`launch_table` keep the interpreter lock: getting it back may take longer
than they do.
"""

from typing import Any

class _Device: ...
class _Buffer: ...

def load(path: str | None, tensor_types: tuple[type, ...], exchange: object, /) -> None:
    """Load the driver; None: the system's.

    Args:
        tensor_types: Classes that tensors may be of.
        exchange: The ``__dlpack_c_exchange_api__`` of those; None: tensors are described in Python.

    Raises:
        OSError: There is none, or it lacks a function; DLPack is of another version.
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
        tensor: Or a tuple: the address, the number of elements, ``ord`` of the dtype's letter, the
            units and the elements of a unit that lie together; 0 and 1 without units.

    Returns:
        1 if it has a row. 0 if no kernel takes such a tensor: of another class, dtype or device,
        with gaps, without elements or this axis, or with 2^31 elements. -1 if the buffer has no
        room left; nothing is queued then.
    """

def plan(
    device: _Device, buffer: _Buffer | None, tensors: list[Any], stream: int, /
) -> tuple[list[int], list[tuple[int, bytearray, int, int]]]:
    """Find which tensors can be measured together, and take rows of the buffer for them, in order.

    Returns:
        For each what :func:`measure` returns. Then for each dtype what :func:`launch_table` is to
        be given: the module, a table whose copy on the device it takes, the number of chunks, and
        the address of the partial sums. Without a buffer, the rows are the places in the list.
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
    """Queue the measurement of what :func:`plan` has found.

    Without a buffer norms are taken: 24 zeroed bytes for each, 8 bytes of partial sums for each
    chunk.
    """

def take(buffer: _Buffer, /) -> tuple[int, int, int, int]:
    """Return the numbers of rows and units, and where they begin and end in the buffer, in bytes.

    The codes of units come before the rows: see ``compact`` of the other extension. The buffer is
    empty then, and has to be zeroed in between.
    """

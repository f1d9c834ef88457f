"""Launches of the kernels of ``kernels.cu``; :mod:`telemetry.measure.cuda` says what for.

Nothing here waits for a device but :func:`wait`, and nothing is launched on a stream that is being
captured. Streams are the driver's handles, memory is given by address.

All raise ``RuntimeError`` where the driver returns an error.
"""

from typing import Any

class _Device: ...
class _Buffer: ...
class _Arrival: ...

def load(path: str | None, tensor_types: tuple[type, ...], exchange: object, /) -> None:
    """Load the driver; None: the system's.

    Args:
        tensor_types: Classes that tensors may be of.
        exchange: The ``__dlpack_c_exchange_api__`` of those.

    Raises:
        OSError: There is none, or it lacks a function; DLPack is of another version.
    """

def open(index: int, images: tuple[bytes, ...], /) -> _Device:
    """Load the kernels: those that pack, for float32, for bfloat16, for float16."""

def buffer(device: _Device, address: int, size: int, stream: int, /) -> _Buffer:
    """Make a buffer of so many bytes on the device, which come from a stream."""

def measure(
    buffer: _Buffer, tensor: object, unit_axis: int | None, powers: int, stream: int, /
) -> int:
    """Queue the measurement of a tensor.

    Returns:
        How many rows it takes: one for each 2^31 elements or less. 0 if no kernel takes such a
        tensor: of another class, dtype or device, with gaps, without elements or this axis. -1 if
        the buffer has no room left; nothing is queued then.
    """

def plan(
    device: _Device, buffer: _Buffer | None, tensors: list[Any], stream: int, /
) -> tuple[list[int], list[tuple[int, bytearray, int, int, int]]]:
    """Find which tensors can be measured together, and take rows of the buffer for them, in order.

    Returns:
        For each 1, 0 if no kernel takes it, or -1 if the buffer had no room left. Then for each
        dtype what :func:`measure_many` is to be given: the module, a table whose copy on the device
        it takes, the number of large chunks, that of all, and the address of the partial sums.
        Without a buffer, the rows are the places in the list.
    """

def measure_many(
    buffer: _Buffer,
    module: int,
    large: int,
    count: int,
    table: int,
    partials: int,
    powers: int,
    stream: int,
    /,
) -> None:
    """Queue the measurement of what :func:`plan` has found."""

def norms(
    device: _Device, module: int, count: int, table: int, norms: int, partials: int, stream: int, /
) -> None:
    """Queue the norms of tensors: 24 zeroed bytes for each, 8 bytes for each chunk."""

def contents(buffer: _Buffer, /) -> tuple[int, int, int]:
    """How many rows and units there are, and how many bytes :func:`send` copies."""

def send(buffer: _Buffer, address: int, /) -> _Arrival:
    """Queue packing, the copy to pinned memory, and clearing, behind all that was measured.

    The copy holds HEADs, UNITs and PAIRs as :mod:`telemetry.records.rows` defines them. The buffer
    can be used again at once.
    """

def clear(buffer: _Buffer, /) -> None:
    """Forget what was measured."""

def wait(arrival: _Arrival, waits: bool, /) -> bool:
    """Whether a copy has arrived, once it has or, if ``waits`` is false, now."""

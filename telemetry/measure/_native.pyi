"""C extension that measures tensors in CPU memory, for :mod:`telemetry.measure.native`.

Tensors are given by address and number of elements, are contiguous and do not change during the
call. ``dtype`` is one of ``?bBhHiIqQefd`` as in :mod:`array` and :mod:`struct`, ``E`` for bfloat16,
``4`` and ``5`` for float8_e4m3fn and float8_e5m2.
"""

from collections.abc import Callable
from typing import Any

def measure(
    tensor: tuple[int, int, int, int, int, int, int],
    heads: bytearray,
    pairs: bytearray,
    units: bytearray,
    /,
) -> None:
    """Append the row of a tensor, as :meth:`telemetry.records.rows.Rows.decode` reads it.

    Seven integers describe the tensor:

    * the address of its first element,
    * ``count``: number of elements,
    * ``dtype``: ``ord`` of its letter,
    * ``units``: units of its shape ``[outer, units, inner]``; 0 without extremes of units,
    * ``inner``: adjacent elements of a unit,
    * ``sample_step``: elements from one run of 16 sampled elements to the next, for the histogram;
      0 counts all elements, fewer than 2^32,
    * ``powers``: number of power sums, 2 or 4.

    Raises:
        ValueError: The numbers are inconsistent.
    """

def measure_tensors(
    tensors: list[Any],
    unit_axis: int | None,
    tensor_types: tuple[type, ...],
    exchange: object,
    sample_step: Callable[[int], int],
    powers: int,
    heads: bytearray,
    pairs: bytearray,
    units: bytearray,
    /,
) -> list[bool]:
    """Append the rows of tensor objects, without calling their methods.

    Args:
        tensors: Neither these nor the bytearrays may change during the call.
        unit_axis: Axis of units; None without extremes of units.
        tensor_types: Classes of tensors to read.
        exchange: Their ``__dlpack_c_exchange_api__``.
        sample_step: Returns the sample's step for a number of elements.
        powers, heads, pairs, units: As for :func:`measure`.

    Returns:
        Whether each has a row. Tensors of another class, dtype or device, with gaps, without
        elements or without this axis have none.
    """

def take_norms(
    groups: list[dict[str, Any]],
    identities: bytes,
    tensor_type: type,
    exchange: object,
    row: int,
    /,
) -> float:
    """Read the norms of the gradients of an optimizer's parameters, and its learning rates.

    Args:
        groups: The optimizer's ``param_groups``.
        identities: For each of their parameters two int64: its address as a Python object, and the
            index of its norm, or -1 to skip it.
        tensor_type: Class of the gradients.
        exchange: Its ``__dlpack_c_exchange_api__``.
        row: Address of float64 numbers: the rate of each group, then the norms. Norms of parameters
            without a gradient are not written.

    Returns:
        The squared norm of all gradients together. -1.0, without norms, if the parameters differ, a
        rate is not a number, or a gradient is not a dense float tensor in CPU memory.
    """

def squared_norms(addresses: list[int], counts: list[int], dtypes: bytes, /) -> bytearray:
    """Return the sum of the squares of each tensor's elements, as float64 ``[tensors]``.

    NaN or infinite if an element is, or if a square overflows float64.

    Raises:
        ValueError: The arguments differ in length, or a dtype is unknown.
    """

def instructions() -> list[str]:
    """Return the instruction sets of "baseline", "AVX2" and "AVX-512" that this processor executes.

    The last one, the fastest, is used.
    """

def use_instructions(name: str, /) -> None:
    """Use the code for another of :func:`instructions`, to compare them.

    Raises:
        ValueError: The processor cannot execute it.
    """

"""The C extension; :mod:`telemetry.measure.native` says whether there is one.

Tensors are given by address and number of elements, and must be contiguous and stay as they are
during the call. ``dtype`` is that of their elements: one of ``?bBhHiIqQefd`` as in :mod:`array` and
:mod:`struct`, ``E`` for bfloat16, ``4`` and ``5`` for float8 of types e4m3fn and e5m2.
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
    """Append the row of a tensor, as :meth:`telemetry.records.rows.Rows.decode` takes it.

    Seven integers describe the tensor:

    * the address of its first element,
    * ``count``: how many there are,
    * ``dtype``: ``ord`` of its letter,
    * ``units``: how many units there are in its shape ``[outer, units, inner]``; 0 if they are not
      told apart,
    * ``inner``: elements of a unit that lie together,
    * ``sample_step``: elements from one run of 16 elements to the next, of which a histogram is
      made and scaled up; 0 if all are to be counted, of which there must be less than 2^32,
    * ``powers``: of how many powers there are to be sums, 2 or 4.

    Raises:
        ValueError: The numbers do not fit each other.
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
    """Append the rows of tensor objects, which are asked for nothing in Python.

    Args:
        tensors: Not changed by another thread meanwhile, and the bytearrays neither.
        unit_axis: The axis whose units are told apart; None if none are.
        tensor_types: Classes that they may be of.
        exchange: The ``__dlpack_c_exchange_api__`` of those.
        sample_step: Gives the sample's step for a number of elements.
        powers: As for :func:`measure`.
        heads, pairs, units: Likewise.

    Returns:
        Whether each has a row: not a tensor of another class, dtype or device, one with gaps or
        without elements, or without this axis.
    """

def compact(
    address: int, size: int, heads: bytearray, pairs: bytearray, units: bytearray, /
) -> None:
    """Append rows that a GPU has filled, ``Row`` of ``kernels.cu``.

    The codes of a row's units end where those of the row before begin, the first ones at
    ``address``, where the rows begin. Doing it again gives the same.
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
            place of its norm, or -1 if it is not to be read.
        tensor_type: The class that gradients are to be of.
        exchange: Its ``__dlpack_c_exchange_api__``.
        row: Address of float64 numbers: the rates, one for each group, and the norms behind them.
            Places of parameters without a gradient are left as they are.

    Returns:
        The square of the norm of all gradients together; -1.0, and no norm, if there are other
        parameters, a rate is no number, or a gradient no dense float tensor in CPU memory.
    """

def squared_norms(addresses: list[int], counts: list[int], dtypes: bytes, /) -> bytearray:
    """Sum of the squares of each tensor's elements, as float64 ``[tensors]``.

    NaN or infinite if an element is, and of float64 also where a square is beyond it.

    Raises:
        ValueError: The arguments are not equally long, or a dtype is not known.
    """

def instructions() -> list[str]:
    """Sets of instructions for which there is code that this processor can execute.

    The last of them, the fastest, is used: "baseline", "AVX2" or "AVX-512".
    """

def use_instructions(name: str, /) -> None:
    """Use the code for another of :func:`instructions`, to compare them.

    Raises:
        ValueError: The processor cannot execute it.
    """

"""MessagePack of values and NumPy arrays: frames of the run log, and messages between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from threading import Lock
from typing import Any

import msgspec
import numpy as np

from telemetry.records.rows import COLUMNS

# Of arrays, by the code of their data's extension type.
_DTYPES = [np.dtype(o) for o in ("<i8", "<f8", "?", "<i2", "<f4", COLUMNS)]


def encode(value: Any) -> bytes:
    """Return bytes for :func:`decoder`; text that UTF-8 cannot encode is escaped."""
    try:
        return _encoder.encode(value)
    # Half of a surrogate pair in a module's name, or a batch id beyond 64 bits.
    except (UnicodeEncodeError, OverflowError):
        kept = (bytes, memoryview, np.ndarray)
        return _encoder.encode(
            _escaped(msgspec.to_builtins(value, builtin_types=kept, enc_hook=_plain))
        )


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        data = np.ascontiguousarray(value).data
        return value.shape, msgspec.msgpack.Ext(_DTYPES.index(value.dtype), data)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise NotImplementedError


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return str(value)
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    return [*map(_escaped, value)] if isinstance(value, list | tuple) else value


def _flat_array(code: int, data: memoryview) -> Any:
    array = np.frombuffer(data, _DTYPES[code])
    # A small array must not keep a whole message in memory; a large one is not copied.
    return array.copy() if 4 * data.nbytes < memoryview(data.obj).nbytes else array


def _array(kind: Any, value: Any) -> Any:
    shape, array = value
    dtype = kind.__args__[1].__args__[0]  # of ``NDArray[dtype]``
    if not isinstance(array, np.ndarray) or dtype not in (Any, array.dtype.type):
        raise ValueError(f"not an array of {dtype}")
    return array.reshape(shape)


# msgspec caches what it knows of a class before that is complete. A decoder that another thread
# makes meanwhile reads null pointers, which ends the process with SIGSEGV.
_making = Lock()


@cache
def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that returns the value of this type in bytes of :func:`encode`.

    It raises ValueError for other bytes.
    """
    with _making:
        made = msgspec.msgpack.Decoder(kind, dec_hook=_array, ext_hook=_flat_array)

    def decode(data: bytes) -> Any:
        try:
            return made.decode(data)
        # Not only of msgspec: also of dataclasses that check their arrays.
        except (msgspec.DecodeError, ArithmeticError, LookupError, RecursionError, TypeError) as e:
            raise ValueError(str(e)) from None

    return decode


def decode(kind: Any, data: bytes) -> Any:
    """Return the value of this type in bytes of :func:`encode`; ValueError for other bytes."""
    return decoder(kind)(data)

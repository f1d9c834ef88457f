"""Measures tensors on NVIDIA GPUs with the kernels of ``kernels.cu``, in a single read.

Each tensor of a step is measured on its own stream, into a buffer. At the end of the step the rows
are copied out and the buffer is cleared. Streams wait for each other. The host waits for none of
them until a background thread reads the copy and drops the empty buckets.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from telemetry.measure import native as host
from telemetry.measure import nvrtc
from telemetry.records.rows import UNIT, Rows
from telemetry.torch_private.host_copy import HostCopy, current_stream, raw_stream, send

_missing = host.native  # why the extension is missing; empty if it is loaded
if host.available:
    try:
        from telemetry.measure import _cuda
    except ImportError as error:
        _missing = f"the C extension cannot be loaded: {error}"
    else:
        _missing = ""

log = logging.getLogger("telemetry")

# Memory of a buffer, and buffers of a GPU: one for the step, others for a phase or another logger
# that measures at the same time.
BUFFER_BYTES = 20 * 2**20
BUFFERS = 3
_LEAST_BYTES = 2**20

# Seconds until a buffer that did not fit into memory is allocated again.
_RETRY_S = 60

# The dtypes of the kernels, in the order of the modules of _cuda.c.
DTYPES = tuple(nvrtc.DTYPES)

# Tables of addresses in the cache: of gradients, parameters and moments, of a few dtypes.
_TABLES = 16

_FULL = -1  # returned by _cuda.c if a buffer is full

# Loaded instead of the system's driver.
_DRIVER: str | None = None


# --- GPUs ----------------------------------------------------------------------------------------


_gpus: dict[int, Gpu | None] = {}
_reasons: dict[int, str] = {}
# Kept forever: a stream may still write to their memory.
_given_up: list[Gpu | None] = []
_lock = threading.RLock()  # the garbage collector may close a logger on a thread that holds it


def gpu(index: int) -> Gpu | None:
    """Return the kernels of this GPU; None, logged once, if PyTorch's operations measure instead.

    The first call compiles the kernels, in some seconds, unless they are in the user's cache.
    """
    if index not in _gpus:
        with _lock:
            if index not in _gpus:
                try:
                    _gpus[index] = Gpu(index)
                except (OSError, RuntimeError, MemoryError) as error:
                    give_up(index, error)
    return _gpus[index]


def give_up(index: int, error: Exception) -> None:
    """Fall back to PyTorch's operations on this GPU from now on."""
    _given_up.append(_gpus.get(index))
    _gpus[index], _reasons[index] = None, str(error)
    log.warning(
        "telemetry: tensors on GPU %d are measured by PyTorch's operations, which takes 10 to 50 "
        "times as long: %s",
        index,
        error,
    )


def _failed(index: int, error: RuntimeError) -> None:
    """Fall back to PyTorch's operations, unless the error is a transient lack of memory."""
    if not isinstance(error, torch.cuda.OutOfMemoryError):
        give_up(index, error)


def prepare(devices: Iterable[torch.device]) -> None:
    """Compile and load the kernels for these devices before the first step."""
    for index in {device.index for device in devices if device.type == "cuda"}:
        gpu(index)


def __getattr__(name: str) -> str:
    """``native``: description of the code that measures on the CPU and on each GPU.

    Compiles nothing and uses no GPU.
    """
    if name != "native":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    indices = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return "; ".join([host.native, *(f"GPU {index}: {_state(index)}" for index in indices)])


def _state(index: int) -> str:
    if index not in _gpus:
        return "no logger has used it in this process"
    return "CUDA kernels" if _gpus[index] else f"PyTorch, because {_reasons[index]}"


def _forget() -> None:
    global _lock
    _lock = threading.RLock()
    _given_up.extend(_gpus.values())
    _gpus.clear()


if hasattr(os, "register_at_fork"):  # a forked child has none of its parent's GPUs
    os.register_at_fork(after_in_child=_forget)


class Gpu:
    """Kernels and buffers of one GPU, shared by all loggers of the process.

    On the first use on a model of GPU, another process compares the kernels with PyTorch's
    operations. The user's cache keeps the result.

    Args:
        index: Index of PyTorch's.
        checked: Skip that comparison.

    Raises:
        OSError, RuntimeError, MemoryError: The kernels cannot be used, with the reason.
    """

    def __init__(self, index: int, *, checked: bool = False) -> None:
        if _missing:
            raise OSError(_missing)
        if torch.version.hip is not None:
            raise OSError("there are no kernels for ROCm")
        major, minor = torch.cuda.get_device_capability(index)
        if (major, minor) < (7, 5):
            raise OSError(f"its compute capability {major}.{minor} is below 7.5")
        with ThreadPoolExecutor() as pool:
            architecture = repeat(f"sm_{major}{minor}")
            images = tuple(pool.map(nvrtc.compile_kernels, DTYPES, architecture))
        self.kernels = b"".join(images)
        if not checked:
            nvrtc.check(index, self.kernels)
        _cuda.load(_DRIVER, host.TYPES, host.TENSORS)
        self.index = index
        self.handle = _cuda.open(index, images)
        self._buffers: list[_Buffer] = []
        self._retry_at = 0.0  # time before which no buffer is allocated
        self._tables: dict[tuple[int, bytes], Tensor] = {}
        self._allocate()

    def table(self, data: bytearray, stream: int) -> Tensor:
        """Return addresses on the GPU for work in this stream; uploaded unless they are cached."""
        key = stream, bytes(data)
        with _lock:
            chunks = self._tables.pop(key, None)
            self._tables[key] = chunks = _uploaded(data, self.index) if chunks is None else chunks
            if len(self._tables) > _TABLES:
                del self._tables[next(iter(self._tables))]  # least recently used
        return chunks

    def lend(self, owner: GpuRows) -> _Buffer | None:
        """Lend a buffer to ``owner`` alone; None during a capture or if there is no memory."""
        if torch.cuda.is_current_stream_capturing():
            return None
        with _lock:
            free = [buffer for buffer in self._buffers if buffer.owner() is None]
            for buffer in (free or self._allocate())[:1]:
                if buffer.owner is not _nobody:  # its step was abandoned
                    buffer.take()
                buffer.owner = ref(owner)
                return buffer
        return None

    def _allocate(self) -> list[_Buffer]:
        """Allocate another buffer, within the limit and the memory; empty if that fails."""
        may = len(self._buffers) < BUFFERS and time.monotonic() >= self._retry_at
        size = BUFFER_BYTES if may else 0
        while size >= _LEAST_BYTES:
            try:
                memory = _device_memory(size, self.index)
            except torch.cuda.OutOfMemoryError:
                if not self._retry_at:
                    log.warning(
                        "telemetry: GPU %d lacks memory to measure many tensors at once, so it "
                        "takes longer: %d MiB",
                        self.index,
                        size >> 20,
                    )
                size, self._retry_at = size // 4, time.monotonic() + _RETRY_S
            else:
                self._buffers.append(_Buffer(self, memory))
                return self._buffers[-1:]
        return []


def _nobody() -> None:
    return None


class _Buffer:
    """GPU memory for the rows of a step; zeros where there is no row.

    The stream that copies the rows also clears the memory behind them. Each stream of the next step
    waits for that once.
    """

    def __init__(self, gpu: Gpu, memory: Tensor) -> None:
        self.owner: Any = _nobody
        self._index = gpu.index
        self._memory = memory
        self._handle = _cuda.buffer(gpu.handle, memory.data_ptr(), memory.nbytes)
        self._clear(memory)

    def enter(self, stream: int) -> Any:
        """Order the current stream behind clearing; the handle for C, or None during a capture."""
        if stream not in self._streams:
            if torch.cuda.is_current_stream_capturing():
                return None
            current = current_stream(self._memory.device)
            current.wait_event(self._cleared)
            self._streams[stream] = current
        return self._handle

    def take(self) -> tuple[HostCopy, int, int] | None:
        """Start the copy of the rows to the host, and free the buffer; None if it is empty.

        Returns:
            The copy, and its numbers of rows and of units, which come first.

        Raises:
            RuntimeError: The current stream is captured, or the copy lacks memory.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("the end of the step is captured by a CUDA graph")
        rows, units, first, end = _cuda.take(self._handle)
        self.owner = _nobody
        if not rows:
            return None
        filled = self._memory[first // UNIT.itemsize : end // UNIT.itemsize]
        current = current_stream(filled.device)
        for stream in self._streams.values():
            if stream != current:
                current.wait_stream(stream)
        try:
            copy = HostCopy(filled)
        finally:
            self._clear(filled)
        send(filled.device)
        return copy, rows, units

    def _clear(self, memory: Tensor) -> None:
        memory.zero_()
        current = current_stream(memory.device)
        self._cleared = current.record_event()
        self._streams: dict[int, Any] = {raw_stream(self._index): current}


# Replaced by tests without a GPU.


def _device_memory(size: int, index: int) -> Tensor:
    """Allocate ``size`` bytes, a multiple of 8, in the current stream."""
    with torch.inference_mode(False):
        return torch.empty(size // 8, dtype=torch.int64, device=f"cuda:{index}")


def _uploaded(data: bytearray, index: int) -> Tensor:
    """Copy to the GPU in the current stream."""
    try:
        pinned = torch.frombuffer(data, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        raise torch.cuda.OutOfMemoryError(str(error)) from error
    return pinned.to(f"cuda:{index}", non_blocking=True)


# --- the rows of a step --------------------------------------------------------------------------


class GpuRows:
    """Rows of one step's tensors on one GPU; not thread-safe."""

    def __init__(self, gpu: Gpu) -> None:
        self.numbers: list[int] = []  # index of the tensor of each row; -1 without a tensor
        self._gpu = gpu
        self._buffer: _Buffer | None = None
        self._sent: list[tuple[HostCopy, int, int]] = []  # with numbers of rows and of units

    def add(self, tensor: Tensor, unit_axis: int | None, powers: int, number: int) -> bool:
        """Queue the measurement in the current stream; False if no kernel takes the tensor.

        Raises:
            RuntimeError: The driver returned an error. PyTorch's operations measure later tensors.
            torch.cuda.OutOfMemoryError, MemoryError: Memory is lacking; later tensors are tried.
        """
        given = (
            tensor if host.TENSORS and not tensor.is_neg() else host.given([tensor], unit_axis)[0]
        )
        stream = raw_stream(self._gpu.index)
        try:
            handle = self._entered(stream)
            taken = handle and _cuda.measure(handle, given, unit_axis, powers, stream)
            if taken == _FULL:
                self._send_buffer()
        except RuntimeError as error:
            _failed(self._gpu.index, error)
            raise
        if taken == _FULL:  # the next buffer is empty
            return self.add(tensor, unit_axis, powers, number)
        if taken:
            self.numbers.append(number)
        return bool(taken)

    def add_all(self, tensors: Sequence[Tensor], powers: int, number: int) -> list[bool]:
        """Measure many tensors; those that kernels take are numbered from ``number`` on."""
        found: list[bool] = []
        rest, stream = host.given(tensors, None), raw_stream(self._gpu.index)
        try:
            while rest and (handle := self._entered(stream)) is not None:
                taken, tables = _cuda.plan(self._gpu.handle, handle, rest, stream)
                known = taken[: taken.index(_FULL)] if _FULL in taken else taken
                self.numbers += [-1] * sum(known)  # if memory is lacking, other tensors may follow
                for table in tables:
                    _launch(self._gpu, handle, table, 0, powers, stream)
                self.numbers[len(self.numbers) - sum(known) :] = range(number, number + sum(known))
                number += sum(known)
                found += map(bool, known)
                rest = rest[len(known) :]
                if rest:
                    self._send_buffer()
        except RuntimeError as error:
            _failed(self._gpu.index, error)
            raise
        return found + [False] * len(rest)

    def _entered(self, stream: int) -> Any:
        """Return the handle of the step's buffer for this stream; None: nothing can be measured."""
        if self._buffer is None:
            self._buffer = self._gpu.lend(self)
        return None if self._buffer is None else self._buffer.enter(stream)

    def _send_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        sent = None if buffer is None else buffer.take()
        if sent is not None:
            self._sent.append(sent)

    def send(self) -> int:
        """Start the copy to the host; return the bytes of all copies of the step."""
        self._send_buffer()
        return sum([copy.nbytes for copy, _, _ in self._sent])

    def decode(self) -> Rows:
        """Wait for the rows and return them."""
        found = host.HostRows()
        for copy, rows, units in self._sent:
            found.add_compacted(copy.wait().data_ptr() + units * UNIT.itemsize, rows)
        return found.decode().take(np.arange(len(self.numbers)))  # without rows of failed launches


def _launch(gpu: Gpu, buffer: Any, table: Any, norms: int, powers: int, stream: int) -> None:
    """Queue the measurement of one dtype's table of ``plan``."""
    module, data, count, partials = table
    chunks = gpu.table(data, stream)
    addresses = chunks.data_ptr(), norms, partials
    _cuda.launch_table(gpu.handle, buffer, module, count, *addresses, powers, stream)


# --- norms ---------------------------------------------------------------------------------------


def norms(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the L2 norm and the largest magnitude of each tensor, in one launch per dtype.

    Args:
        tensors: All on the same GPU.

    Returns:
        float64 ``[2, tensors]`` on the GPU; infinite or NaN where an element is. None if one of the
        tensors is not taken.
    """
    index = tensors[0].get_device()
    found = gpu(index)
    if found is None:
        return None
    stream = raw_stream(index)
    try:
        taken, tables = _cuda.plan(found.handle, None, host.given(tensors, None), stream)
        if not all(taken):
            return None
        # Of each: sum of squares, largest magnitude, number of finished blocks.
        values = _device_memory(24 * len(tensors), index).zero_().view(torch.float64).view(-1, 3)
        for module, data, count, _ in tables:
            partials = _device_memory(8 * count, index)
            table = module, data, count, partials.data_ptr()
            _launch(found, None, table, values.data_ptr(), 2, stream)
    except RuntimeError as error:
        _failed(index, error)
        raise
    values[:, 0].sqrt_()
    return values[:, :2].t()

"""Copies tensors to the host without blocking the training thread."""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

# Types of devices with CUDA's streams; ROCm has the same name.
_WITH_STREAMS = {"cuda"}

_DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class HostCopy:
    """The values that ``tensor`` has now, to be read later and on any thread.

    A CPU tensor is copied at once. A CUDA tensor is copied on the device; :func:`send`, or the
    first :meth:`wait`, transfers all of these copies to the host together. Tensors of other
    accelerators are transferred one by one.

    Args:
        owned: Nothing else will write to the tensor, so that no copy on its device is needed.

    Attributes:
        nbytes: Host memory of the values.

    Raises:
        RuntimeError: A CUDA graph is being captured.
    """

    def __init__(self, tensor: Tensor, *, owned: bool = False) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self._outbox: _Outbox | None = None
        self._event: torch.Event | None = None
        tensor = tensor.detach()
        device = tensor.device
        if device.type == "cpu":
            self._values = tensor if owned else tensor.clone()
        elif device.type in _WITH_STREAMS and not hasattr(tensor, "to_local"):
            if torch.get_device_module(device).is_current_stream_capturing():
                raise RuntimeError(
                    "a tensor of a CUDA graph that is being captured has no values yet; "
                    "log it after the graph was replayed"
                )
            self._values = tensor if owned else tensor.clone(memory_format=torch.contiguous_format)
            self._outbox = _outbox(device)
            self._outbox.add(self)
        else:
            self._values = tensor.to("cpu", non_blocking=True)
            self._event = torch.Event(device=device)
            self._event.record()

    def wait(self) -> Tensor:
        """Return the values, on the CPU; same shape and dtype."""
        if self._outbox is not None:
            self._outbox.send()
        assert self._outbox is None, "the transfer has failed"
        if self._event is not None:
            with relaxed_capture():
                self._event.synchronize()
            self._event = None
        return self._values


def send(device: torch.device) -> None:
    """Start the transfer of all copies on this device."""
    if device.type in _WITH_STREAMS:
        _outbox(device).send()


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread wait without invalidating another thread's capture of a CUDA graph.

    In the default mode of ``torch.cuda.graph``, even a query of an event invalidates it.
    """
    exchange, mode = _exchange_capture_mode(), ctypes.c_int(_RELAXED)
    if exchange is None:
        yield
        return
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@cache
def _exchange_capture_mode() -> Any:
    """Return the driver's function, which stores the mode before; None without the driver."""
    try:
        return ctypes.CDLL(_DRIVER).cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):
        return None


def current_stream(device: torch.device) -> Any:
    """Return this thread's stream of the device; None if it has no streams."""
    if device.type not in _WITH_STREAMS:
        return None
    return torch.get_device_module(device).current_stream(device)


class _Outbox:
    """The copies on one device, transferred to pinned memory together, on a separate stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = self._backend.Stream(device)
        self._waiting: deque[weakref.ref[HostCopy]] = deque()
        # For each stream that makes copies: an event after the latest one.
        self._copied: dict[Any, Any] = {}
        # Reentrant, because the garbage collector may close another logger on this thread.
        self._lock = threading.RLock()

    def add(self, copy: HostCopy) -> None:
        """Add a copy that is made on the current stream; sent unless it is freed before."""
        stream = self._backend.current_stream(self._device)
        if stream not in self._copied:
            self._copied[stream] = self._backend.Event()
        self._copied[stream].record(stream)
        self._waiting.append(weakref.ref(copy))  # last, because another thread may send it now

    def send(self) -> None:
        """Start the transfer of all copies; afterwards each has an event to wait for."""
        with self._lock:
            added = [self._waiting.popleft()() for _ in range(len(self._waiting))]
            copies = [copy for copy in added if copy is not None]
            if copies:
                with relaxed_capture():  # pinned memory is allocated
                    self._send(copies)

    def _send(self, copies: list[HostCopy]) -> None:
        # The widest dtypes first, so that all are aligned.
        copies.sort(key=lambda copy: -copy._values.element_size())
        sources = [copy._values for copy in copies]
        parts = [source.view(-1).view(torch.uint8) for source in sources]
        with self._backend.stream(self._stream):
            for event in list(self._copied.values()):
                self._stream.wait_event(event)
            on_host = torch.cat(parts).to("cpu", non_blocking=True)
            arrived = self._backend.Event(blocking=True)  # wait without spinning
            arrived.record(self._stream)
        targets = on_host.split([part.numel() for part in parts])
        for copy, source, target in zip(copies, sources, targets, strict=True):
            source.record_stream(self._stream)
            copy._values = target.view(source.dtype).view(source.shape)
            copy._event = arrived
            copy._outbox = None


@cache
def _outbox(device: torch.device) -> _Outbox:
    return _Outbox(device)

"""Values of tensors on their way to the host, without the training thread waiting for them."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor

_WITH_STREAMS = {"cuda"}
"""Types of devices with streams like CUDA's; ROCm's goes by that name, too."""


class HostCopy:
    """The values that ``tensor`` has now, to be read later and from any thread.

    The values of a CPU tensor are copied at once. Those of a CUDA tensor are copied on the device
    and wait there, until :func:`send` or the first :meth:`wait` brings all that have gathered to
    the host together. Those of another accelerator's tensor go to the host one by one.

    Attributes:
        nbytes: Host memory that the values take.

    Raises:
        RuntimeError: The tensor is part of a CUDA graph that is being captured.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.nbytes = tensor.numel() * tensor.element_size()
        self._outbox: _Outbox | None = None
        self._event: torch.Event | None = None
        tensor = tensor.detach()
        device = tensor.device
        if device.type == "cpu":
            self._values = tensor.clone()
        elif device.type in _WITH_STREAMS and not hasattr(tensor, "to_local"):
            if torch.get_device_module(device).is_current_stream_capturing():
                raise RuntimeError(
                    "a tensor of a CUDA graph that is being captured has no values yet; "
                    "log it after the graph was replayed"
                )
            self._values = tensor.clone(memory_format=torch.contiguous_format)
            self._outbox = _outbox(device)
            self._outbox.add(self)
        else:
            self._values = tensor.to("cpu", non_blocking=True)
            self._event = torch.Event(device=device)
            self._event.record()

    def wait(self) -> Tensor:
        """The values, on the CPU; same shape and dtype."""
        if self._outbox is not None:
            self._outbox.send()
        assert self._outbox is None, "to send the values has failed"
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values


def send(device: torch.device) -> None:
    """Start the transfer of all values that are waiting on a device."""
    if device.type in _WITH_STREAMS:
        _outbox(device).send()


def current_stream(device: torch.device) -> Any:
    """The stream that this thread gives the device's work to; None where there are none."""
    if device.type not in _WITH_STREAMS:
        return None
    return torch.get_device_module(device).current_stream(device)


class _Outbox:
    """What is waiting on one device: goes to pinned memory in one copy, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._backend: Any = torch.get_device_module(device)
        self._stream = self._backend.Stream(device)
        self._waiting: deque[weakref.ref[HostCopy]] = deque()
        # Of each stream that gave values: recorded behind the last of them.
        self._given: dict[Any, Any] = {}
        # Reentrant, for the garbage collector may close another logger on the same thread.
        self._lock = threading.RLock()

    def add(self, copy: HostCopy) -> None:
        """Take values that the current stream makes; they are sent if anyone still holds them."""
        stream = self._backend.current_stream(self._device)
        if stream not in self._given:
            self._given[stream] = self._backend.Event()
        self._given[stream].record(stream)
        self._waiting.append(weakref.ref(copy))  # once the event is there for another thread

    def send(self) -> None:
        """Start the transfer of all that was added; returns when each has an event to wait for."""
        with self._lock:
            copies = []
            while self._waiting:
                copy = self._waiting.popleft()()
                if copy is not None:
                    copies.append(copy)
            if copies:
                self._send(copies)

    def _send(self, copies: list[HostCopy]) -> None:
        # The widest numbers first, so that all are aligned.
        copies.sort(key=lambda copy: -copy._values.element_size())
        sources = [copy._values for copy in copies]
        parts = [source.view(-1).view(torch.uint8) for source in sources]
        with self._backend.stream(self._stream):
            for event in list(self._given.values()):
                self._stream.wait_event(event)
            on_host = torch.cat(parts).to("cpu", non_blocking=True)
            arrived = self._backend.Event(blocking=True)  # whoever waits is not to spin
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

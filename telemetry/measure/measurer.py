"""Takes the measurements of a step, in order."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from telemetry.measure import host, native
from telemetry.measure.device import DeviceTensors
from telemetry.measure.native import Pending
from telemetry.measure.tensors import Values, values_of
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch


class Measurer:
    """Reads many tensors of one step on their devices, and leaves the rest of the work for later.

    Tensors in CPU memory are read immediately, by the C extension in a single pass. Its histogram
    of more than 131,072 elements is that of a sample of about 65,536, scaled up. Tensors on an
    accelerator are reduced there, with a histogram of all elements.

    Call :meth:`add` and :meth:`finish` with autocast and dispatch modes off. They draw no random
    numbers, never wait for a device, change no global state, record nothing for autograd and are
    thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._devices: dict[torch.device, DeviceTensors] = {}
        self._pending: list[Pending] = []
        # The tensor that was added last, its version and axis of units, and its index.
        self._last: tuple[weakref.ref[Tensor], int, int | None, int] | None = None

    def add(self, tensor: Tensor, *, unit_axis: int | None = None) -> int | None:
        """Measure ``tensor`` as it is now, without keeping it.

        A tensor that comes again at once, unchanged as far as PyTorch knows, is not read again:
        containers return what their last module returned.

        Args:
            tensor: Any shape, layout, numeric dtype and device. Complex numbers count with their
                magnitude, and a sparse tensor with all its zeros.
            unit_axis: Axis of the units or channels whose extremes are measured; may be negative.

        Returns:
            The index of its record in what ``reduce`` returns. None if it cannot be measured:
            meta and fake tensors and other wrappers (pass a DTensor's local tensor), nested and
            quantized tensors, dtypes of less than 8 bits, uncoalesced sparse tensors on an
            accelerator, anything on MPS (it has no float64).

        Raises:
            IndexError: The tensor has no axis ``unit_axis``.
        """
        index = self.add_plain(tensor, unit_axis=unit_axis)
        if index is not None:
            return index
        values = values_of(tensor, unit_axis)
        if values is None:
            return None
        read = host.measure(values) if _on_host(values) else None
        with self._lock:
            index = self._append(values, read)
            self._note_last(tensor, unit_axis, index)
            return index

    def add_plain(self, tensor: Tensor, *, unit_axis: int | None = None) -> int | None:
        """The same of a dense tensor of floats in CPU memory; None, and nothing done, for others.

        It calls no operation of PyTorch's, so it may be called anywhere but in torch-function
        modes.
        """
        with self._lock:
            known, *last, index = self._last or (_no_tensor, None, -1)
            if known() is tensor and last == [_version_of(tensor), unit_axis]:
                return index
        read = native.measure_plain(tensor, unit_axis)
        if read is None:
            return None
        with self._lock:
            self._pending.append(read)
            self._note_last(tensor, unit_axis, len(self._pending) - 1)
            return len(self._pending) - 1

    def _note_last(self, tensor: Tensor, unit_axis: int | None, index: int) -> None:
        version = _version_of(tensor)
        if version is not None:
            self._last = weakref.ref(tensor), version, unit_axis, index

    def add_all(self, tensors: Iterable[Tensor]) -> list[int | None]:
        """The same of many tensors without units, for less than one by one."""
        several = [values_of(tensor, None) for tensor in tensors]
        here = [values for values in several if values is not None and _on_host(values)]
        on_host = iter(host.measure_all(here))
        read = [next(on_host) if v is not None and _on_host(v) else None for v in several]
        with self._lock:
            return [
                None if values is None else self._append(values, pending)
                for values, pending in zip(several, read, strict=True)
            ]

    def _append(self, values: Values, read: Pending | None) -> int:
        """Take what was ``read`` in CPU memory, or measure what is elsewhere."""
        pending = read or _empty
        if read is None and values.tensor.numel():
            device = self._devices.setdefault(values.tensor.device, DeviceTensors())
            pending = device.add(values)
        if values.implied_zeros:
            pending = partial(_with_zeros, pending, values.implied_zeros)
        self._pending.append(pending)
        return len(self._pending) - 1

    def finish(self) -> Measurements:
        """Everything since the last call, for any thread to reduce. Begins the next step."""
        with self._lock:
            pending, devices = self._pending, self._devices
            self._begin()
        copied_bytes = sum(device.send() for device in devices.values())
        return Measurements(pending, copied_bytes)


class Measurements:
    """What a :class:`Measurer` measured at one step.

    Attributes:
        copied_bytes: Size of what accelerators send to the host for it.
    """

    def __init__(self, pending: list[Pending], copied_bytes: int) -> None:
        self.copied_bytes = copied_bytes
        self._pending = pending
        self._records: list[TensorRecord] | None = None

    def reduce(self) -> list[TensorRecord]:
        """One record for each tensor that was added, in that order; waits for accelerators.

        Call it on one thread at a time. Later calls return the same list.
        """
        if self._records is None:
            try:
                self._records = [record() for record in self._pending]
            finally:
                self._pending.clear()
        return self._records


def _no_tensor() -> None:
    """Stands for a reference to a tensor that is gone."""


def _version_of(tensor: Tensor) -> int | None:
    """How often it was changed in place; None where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def _on_host(values: Values) -> bool:
    return values.tensor.is_cpu and values.tensor.numel() > 0


def _empty() -> TensorRecord:
    return TensorRecord(sketch=Sketch.empty())


def _with_zeros(pending: Pending, zeros: int) -> TensorRecord:
    """The record of a sparse tensor from that of its stored values."""
    return TensorRecord(sketch=pending().sketch.merge(Sketch.of_zeros(zeros)))

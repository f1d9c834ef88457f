"""Takes the measurements of a step, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from telemetry.measure import native
from telemetry.measure.device import DeviceTensors
from telemetry.measure.native import Pending
from telemetry.measure.tensors import values_of
from telemetry.records import TensorRecord
from telemetry.records.sketch import Sketch


class Measurer:
    """Reads many tensors of one step on their devices, and leaves the rest of the work for later.

    Tensors in CPU memory are read immediately, by the C extension in a single pass. Its histogram
    of more than 65,536 elements is that of a sample of about 32,768, scaled up. Tensors on an
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

    def add(self, tensor: Tensor, *, unit_axis: int | None = None, powers: int = 4) -> int | None:
        """Measure ``tensor`` as it is now, without keeping it.

        Args:
            tensor: Any shape, layout, numeric dtype and device. Complex numbers count with their
                magnitude, and a sparse tensor with all its zeros.
            unit_axis: Axis of the units or channels whose extremes are measured; may be negative.
            powers: 4, or 2 where nobody asks for the kurtosis: it is not known then, which takes
                a quarter less time on the CPU.

        Returns:
            The index of its record in what ``reduce`` returns. None if it cannot be measured:
            meta and fake tensors and other wrappers (pass a DTensor's local tensor), nested and
            quantized tensors, dtypes of less than 8 bits, uncoalesced sparse tensors on an
            accelerator, anything on MPS (it has no float64).

        Raises:
            IndexError: The tensor has no axis ``unit_axis``.
        """
        pending = native.measure_one(tensor, unit_axis, powers)
        if pending is None:
            pending = self._measure_other(tensor, unit_axis, powers)
        if pending is None:
            return None
        with self._lock:
            self._pending.append(pending)
            return len(self._pending) - 1

    def add_all(self, tensors: Sequence[Tensor], *, powers: int = 4) -> list[int | None]:
        """Measure many tensors without units, for less than one by one."""
        found: list[int | None] = []
        for tensor, plain in zip(tensors, native.measure_all(tensors, powers), strict=True):
            pending = plain or self._measure_other(tensor, None, powers)
            with self._lock:
                found.append(None if pending is None else len(self._pending))
                if pending is not None:
                    self._pending.append(pending)
        return found

    def _measure_other(self, tensor: Tensor, unit_axis: int | None, powers: int) -> Pending | None:
        """Measure what is not plain."""
        values = values_of(tensor, unit_axis)
        if values is None:
            return None
        pending: Pending = _empty
        if values.tensor.is_cpu and values.tensor.numel():
            pending = native.measure(values, powers)
        elif values.tensor.numel():
            with self._lock:
                device = self._devices.setdefault(values.tensor.device, DeviceTensors())
                pending = device.add(values)
        return partial(_with_zeros, pending, zeros) if (zeros := values.implied_zeros) else pending

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


def _empty() -> TensorRecord:
    return TensorRecord(sketch=Sketch.empty())


def _with_zeros(pending: Pending, zeros: int) -> TensorRecord:
    """The record of a sparse tensor from that of its stored values."""
    return TensorRecord(sketch=pending().sketch.merge(Sketch.of_zeros(zeros)))

"""Takes the measurements of a step, in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from telemetry.measure import cuda
from telemetry.measure.device import DeviceRows
from telemetry.measure.native import HostRows
from telemetry.measure.tensors import values_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors


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
        self._count = 0
        self._host = HostRows()
        self._of_host: list[int] = []  # which tensor each row is of
        self._devices: dict[torch.device, DeviceRows] = {}
        self._gpus: dict[int, cuda.GpuRows] = {}

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
        with self._lock:
            if tensor.is_cuda:
                (number,) = self._add_on_gpus([tensor], unit_axis, powers)
                if number is not None:
                    return number
            elif self._host.add_plain([tensor], unit_axis, powers)[0]:
                self._of_host.append(self._count)
                self._count += 1
                return self._count - 1
        return self._add_other(tensor, unit_axis, powers)

    def add_all(self, tensors: Sequence[Tensor], *, powers: int = 4) -> list[int | None]:
        """Measure many tensors without units, for less than one by one; see :meth:`add`."""
        with self._lock:
            if tensors and tensors[0].is_cuda:
                found = self._add_on_gpus(tensors, None, powers)
            else:
                measured = self._host.add_plain(tensors, None, powers)
                first, self._count = self._count, self._count + sum(measured)
                numbers = range(first, self._count)
                self._of_host += numbers
                if all(measured):
                    return list(numbers)
                rest = iter(numbers)
                found = [next(rest) if known else None for known in measured]
        return [
            self._add_other(tensor, None, powers) if number is None else number
            for tensor, number in zip(tensors, found, strict=True)
        ]

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _add_on_gpus(
        self, tensors: Sequence[Tensor], unit_axis: int | None, powers: int
    ) -> list[int | None]:
        found: list[int | None] = [None] * len(tensors)
        places: dict[int, list[int]] = {}
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                places.setdefault(tensor.get_device(), []).append(place)
        for index, some in places.items():
            gpu = cuda.gpu(index)
            if gpu is None:
                continue
            rows = self._gpus.setdefault(index, cuda.GpuRows(gpu))
            taken = rows.add([tensors[place] for place in some], unit_axis, powers, self._count)
            for place in itertools.compress(some, taken):
                found[place] = self._next()
        return found

    def _add_other(self, tensor: Tensor, unit_axis: int | None, powers: int) -> int | None:
        """Measure what is not plain."""
        values = values_of(tensor, unit_axis)
        if values is None:
            return None
        stored, number = values.tensor, None
        with self._lock:
            try:
                if values.implied_zeros or not stored.numel():
                    self._host.add_zeros(values.implied_zeros)
                if stored.numel() and not stored.is_cpu:
                    rows = self._devices.setdefault(stored.device, DeviceRows())
                    rows.add(values, self._count)
                elif stored.numel():
                    self._host.add(values, powers)
                number = self._next()
            finally:
                owner = -1 if number is None else number
                self._of_host += [owner] * (len(self._host) - len(self._of_host))
        return number

    def finish(self) -> Measurements:
        """Everything since the last call, for any thread to reduce. Begins the next step."""
        with self._lock:
            devices: list[DeviceRows | cuda.GpuRows]
            devices = [*self._devices.values(), *self._gpus.values()]
            measured = Measurements(self._count, self._host, self._of_host, devices)
            self._begin()
        measured.send()
        return measured


class Measurements:
    """What a :class:`Measurer` measured at one step.

    Attributes:
        nbytes: Memory of the host that it takes until it is reduced.
    """

    def __init__(
        self,
        count: int,
        host: HostRows,
        of_host: list[int],
        devices: Sequence[DeviceRows | cuda.GpuRows],
    ) -> None:
        self._count, self._host, self._of_host, self._devices = count, host, of_host, devices
        self._tensors: Tensors[int] | None = None
        self.nbytes = host.nbytes

    def send(self) -> None:
        """Start the copies to the host."""
        self.nbytes += sum([device.send() for device in self._devices])

    def reduce(self) -> Tensors[int]:
        """Every tensor that was added, in that order; waits for accelerators.

        Call it on one thread at a time. Later calls return the same.
        """
        if self._tensors is None:
            devices = self._devices
            rows = Rows.concatenate([self._host.decode(), *(d.decode() for d in devices)])
            places = np.array([*self._of_host, *(n for d in devices for n in d.numbers)], np.int64)
            rows = rows.merged(places, self._count).having(calls=1)  # also of several rows
            self._tensors = Tensors(range(self._count), rows)
            self._devices = ()
        return self._tensors

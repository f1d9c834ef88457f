"""Takes the measurements of a step, in order."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from telemetry.measure import cuda, native
from telemetry.measure.device import DeviceRows
from telemetry.measure.native import HostRows
from telemetry.measure.tensors import WORKING_DTYPE, Values, values_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors


class Measurer:
    """Reads the tensors of a step on their devices; the rest is left to ``reduce``.

    Tensors in CPU memory are read immediately, by the C extension in a single pass. Its histogram
    of more than 65,536 elements is that of a sample of about 32,768, scaled up. Tensors on an
    accelerator are reduced there, with a histogram of all elements.

    Call :meth:`add` and :meth:`finish` with autocast and dispatch modes off. They draw no random
    numbers, never wait for a device, change no global state, record nothing for autograd and are
    thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = Measurements()

    def add(self, tensor: Tensor, *, unit_axis: int | None = None, powers: int = 4) -> int | None:
        """Measure ``tensor`` as it is now, without keeping it.

        Args:
            tensor: Any shape, layout, numeric dtype and device. Complex numbers count with their
                magnitude, and a sparse tensor with all its zeros.
            unit_axis: Axis of the units or channels whose extremes are measured; may be negative.
            powers: 4; or 2 without the kurtosis, in a quarter less time on the CPU.

        Returns:
            The index of its record in the result of ``reduce``. None if it cannot be measured:
            meta and fake tensors and other wrappers (pass a DTensor's local tensor), nested and
            quantized tensors, dtypes of less than 8 bits, uncoalesced sparse tensors on an
            accelerator, anything on MPS (it has no float64).

        Raises:
            IndexError: The tensor has no axis ``unit_axis``.
        """
        return self.add_all([tensor], unit_axis=unit_axis, powers=powers)[0]

    def add_all(
        self, tensors: Sequence[Tensor], *, unit_axis: int | None = None, powers: int = 4
    ) -> list[int | None]:
        """Measure many tensors in one call, which is faster; see :meth:`add`."""
        with self._lock:
            step = self._step
            if tensors and tensors[0].is_cuda:
                found = step.add_on_gpus(tensors, unit_axis, powers)
            else:
                measured = step.host.add_plain(tensors, unit_axis, powers)
                first, step.count = step.count, step.count + sum(measured)
                numbers = range(first, step.count)
                step.host.numbers += numbers
                rest = iter(numbers)
                found = [next(rest) if known else None for known in measured]
        if None not in found:
            return found
        return [
            self._add_other(tensor, unit_axis, powers) if number is None else number
            for tensor, number in zip(tensors, found, strict=True)
        ]

    def _add_other(self, tensor: Tensor, unit_axis: int | None, powers: int) -> int | None:
        """Measure a tensor that the extensions do not read as it is."""
        values = values_of(tensor, unit_axis)
        if values is None:
            return None
        stored, number = values.tensor, None
        with self._lock:
            step = self._step
            try:
                if values.implied_zeros or not stored.numel():
                    step.host.add_zeros(values.implied_zeros)
                if stored.numel() and step.takes_copy(values, powers):
                    pass
                elif stored.numel() and not stored.is_cpu:
                    step.devices.setdefault(stored.device, DeviceRows()).add(values, step.count)
                elif stored.numel():
                    step.host.add(values, powers)
                number = step.next_number()
            finally:
                numbers, owner = step.host.numbers, -1 if number is None else number
                numbers += [owner] * (len(step.host) - len(numbers))
        return number

    def finish(self) -> Measurements:
        """Return the measurements since the last call, for any thread to reduce."""
        with self._lock:
            measured, self._step = self._step, Measurements()
        measured.send()
        return measured


class Measurements:
    """Measurements of one step, by a :class:`Measurer`."""

    def __init__(self) -> None:
        self.nbytes = 0  # host memory between send() and reduce()
        self.count = 0
        self.host = HostRows()
        self.devices: dict[torch.device, DeviceRows] = {}
        self.gpus: dict[int, cuda.GpuRows] = {}
        self._tensors: Tensors[int] | None = None

    def on_gpu(self, index: int) -> cuda.GpuRows | None:
        """Return the rows of an NVIDIA GPU; None if it has no kernels."""
        gpu, rows = cuda.gpu(index), self.gpus.get(index)
        if gpu is not None and rows is None:
            rows = self.gpus[index] = cuda.GpuRows(gpu)
        return None if gpu is None else rows

    def add_on_gpus(
        self, tensors: Sequence[Tensor], unit_axis: int | None, powers: int
    ) -> list[int | None]:
        """Measure tensors with kernels; return the number of each, None if it has none."""
        if len(tensors) == 1 or unit_axis is not None:
            return [self._add_on_gpu(tensor, unit_axis, powers) for tensor in tensors]
        found: list[int | None] = [None] * len(tensors)
        places: dict[int, list[int]] = {}  # by the index of the GPU
        for place, tensor in enumerate(tensors):
            if tensor.is_cuda:
                places.setdefault(tensor.get_device(), []).append(place)
        for index, some in places.items():
            if (rows := self.on_gpu(index)) is not None:
                taken = rows.add_all([tensors[place] for place in some], powers, self.count)
                for place in itertools.compress(some, taken):
                    found[place] = self.next_number()
        return found

    def _add_on_gpu(self, tensor: Tensor, unit_axis: int | None, powers: int) -> int | None:
        rows = self.on_gpu(tensor.get_device()) if tensor.is_cuda else None
        if rows is None or not rows.add(tensor, unit_axis, powers, self.count):
            return None
        return self.next_number()

    def takes_copy(self, values: Values, powers: int) -> bool:
        """Whether kernels measure a dense copy of the tensor, in a dtype that they read."""
        tensor, axis, _ = values
        if not tensor.is_cuda or WORKING_DTYPE[tensor.dtype] is not torch.float32:
            return False
        rows = self.on_gpu(tensor.get_device())
        if rows is None:
            return False
        try:
            plain = tensor if tensor.dtype in cuda.DTYPES else tensor.to(torch.float32)
            plain = plain.contiguous()
        except torch.cuda.OutOfMemoryError:  # operations need memory for a piece at a time
            return False
        plain = plain if type(plain) in native.TYPES else plain.as_subclass(native.TYPES[0])
        return rows.add(plain, axis, powers, self.count)

    def next_number(self) -> int:
        self.count += 1
        return self.count - 1

    def send(self) -> None:
        """Start the copies to the host."""
        self.nbytes = sum([part.send() for part in self._parts()])

    def reduce(self) -> Tensors[int]:
        """Wait for accelerators and return the records of all tensors, in the order of adding.

        Call it on one thread at a time. Later calls return the same.
        """
        if self._tensors is None:
            parts = self._parts()
            rows = Rows.concatenate([part.decode() for part in parts])
            places = np.array([number for part in parts for number in part.numbers], np.int64)
            rows = rows.merged(places, self.count).having(calls=1)  # also of several rows
            self._tensors = Tensors(range(self.count), rows)
            self.devices.clear()
            self.gpus.clear()
        return self._tensors

    def _parts(self) -> list[HostRows | DeviceRows | cuda.GpuRows]:
        return [self.host, *self.devices.values(), *self.gpus.values()]

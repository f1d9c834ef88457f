"""Takes the measurements of a step, in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from telemetry.measure import device as accelerators
from telemetry.measure import native
from telemetry.measure.device import DeviceRows
from telemetry.measure.native import HostRows
from telemetry.measure.tensors import Values, sample_step, values_of
from telemetry.records.rows import Rows
from telemetry.records.tensor import Tensors

if native.available:
    from telemetry.measure import _native


class Measurements:
    """Reads the tensors of a step on their devices; the rest is left to :meth:`reduce`.

    Tensors in CPU memory are read immediately, by the C extension in a single pass. Of more than
    65,536 elements, the histogram is that of a sample of about 32,768, scaled up. On an accelerator
    the counts of zeros, NaN and infinities, and the kurtosis, are those of the sample, too.

    Call :meth:`add` and :meth:`finish` with autocast and dispatch modes off. They draw no random
    numbers, never wait for a device, change no global state, record nothing for autograd and are
    thread-safe.

    Attributes:
        nbytes: Host memory between :meth:`finish` and :meth:`reduce`.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._lock = threading.Lock()
        self._count = 0
        self._host = HostRows()
        self._devices: dict[torch.device, DeviceRows] = {}
        self._tensors: Tensors[int] | None = None

    def add(self, tensor: Tensor, *, unit_axis: int | None = None, powers: int = 4) -> int | None:
        """Measure ``tensor`` as it is now, without keeping it.

        Args:
            tensor: Any shape, layout, numeric dtype and device. Complex numbers count with their
                magnitude, and a sparse tensor with all its zeros.
            unit_axis: Axis of the units or channels whose extremes are measured; may be negative.
            powers: 4; or 2 without the kurtosis, in a quarter less time on the CPU.

        Returns:
            The index of its record in the result of :meth:`reduce`. None if it cannot be measured:
            meta and fake tensors and other wrappers (pass a DTensor's local tensor), nested and
            quantized tensors, dtypes of less than 8 bits, uncoalesced sparse tensors on an
            accelerator; on MPS, which has no float64, complex numbers and integers of 32 bits.

        Raises:
            IndexError: The tensor has no axis ``unit_axis``.
        """
        return self.add_all([tensor], unit_axis=unit_axis, powers=powers)[0]

    def add_all(
        self, tensors: Sequence[Tensor], *, unit_axis: int | None = None, powers: int = 4
    ) -> list[int | None]:
        """Measure many tensors in one call, which is faster; see :meth:`add`."""
        numbers: list[int | None] = [None] * len(tensors)
        if native.TENSORS is not None and tensors and accelerators.is_on_host(tensors[0]):
            host, asked = self._host, (unit_axis, native.TYPES, native.TENSORS, sample_step, powers)
            # The memory of a tensor with the negative bit holds other values.
            plain = [t if type(t) in native.TYPES and not t.is_neg() else None for t in tensors]
            with self._lock:
                are_read = _native.measure_tensors(
                    plain, *asked, host.heads, host.pairs, host.units
                )
                for place, is_read in enumerate(are_read):
                    if is_read:
                        numbers[place] = self._count
                        host.numbers.append(self._count)
                        self._count += 1
        if None not in numbers:
            return numbers
        elsewhere: dict[tuple[torch.device, torch.dtype], list[tuple[int, Values]]] = {}
        for place, tensor in enumerate(tensors):
            if numbers[place] is None and (values := values_of(tensor, unit_axis)) is not None:
                stored = values.tensor
                if accelerators.is_on_host(stored) or values.implied_zeros or not stored.numel():
                    numbers[place] = self._add_other(values, powers)
                else:
                    kind = stored.device, stored.dtype
                    elsewhere.setdefault(kind, []).append((place, values))
        for (device, _), some in elsewhere.items():
            with self._lock:
                self._rows_on(device).add([values for _, values in some], powers, self._count)
                for place, _ in some:
                    numbers[place] = self._count
                    self._count += 1
        return numbers

    def _add_other(self, values: Values, powers: int) -> int:
        """Measure a tensor that the extension does not read as it is, or with implied zeros."""
        stored, host, number = values.tensor, self._host, -1
        with self._lock:
            try:
                if values.implied_zeros or not stored.numel():
                    host.add_zeros(values.implied_zeros)
                if stored.numel() and accelerators.is_on_host(stored):
                    host.add(values, powers)
                elif stored.numel():
                    self._rows_on(stored.device).add([values], powers, self._count)
                number = self._count
                self._count += 1
            finally:
                host.numbers += [number] * (len(host) - len(host.numbers))
        return number

    def _rows_on(self, device: torch.device) -> DeviceRows:
        if device not in self._devices:
            self._devices[device] = DeviceRows(device)
        return self._devices[device]

    def finish(self) -> Measurements:
        """Start the copies to the host, and return this object; nothing is added any more."""
        with self._lock:
            self.nbytes = sum([part.send() for part in self._parts()])
        return self

    def reduce(self) -> Tensors[int]:
        """Wait for accelerators and return the records of all tensors, by their indices.

        Call it on one thread at a time. Later calls return the same.
        """
        if self._tensors is None:
            parts = self._parts()
            rows = Rows.concatenate([part.decode() for part in parts])
            places = np.array([number for part in parts for number in part.numbers], np.int64)
            rows = rows.merged(places, self._count).having(calls=1)  # also of several rows
            self._tensors = Tensors(range(self._count), rows)
            self._devices.clear()
        return self._tensors

    def _parts(self) -> list[HostRows | DeviceRows]:
        return [self._host, *self._devices.values()]

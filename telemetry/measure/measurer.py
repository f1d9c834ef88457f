"""The measurements of one step after the other, in the order in which they were taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from telemetry.measure.blocks import BLOCK_BYTES, Arena, BlockPool
from telemetry.measure.device import DeviceTensors
from telemetry.measure.large import LargeTensor, Scratch
from telemetry.measure.moments import FloatType
from telemetry.measure.sampling import sample_size
from telemetry.measure.small import BATCH_ELEMENTS, SMALL_ELEMENTS, SmallTensors
from telemetry.measure.tensors import Values, values_of
from telemetry.records import TensorRecord
from telemetry.sketch import Sketch

Pending = Callable[[], TensorRecord]

_NUMBERS: dict[torch.dtype, FloatType] = {torch.float32: np.float32, torch.float64: np.float64}


class Measurer:
    """Statistics of many tensors of one step: cheap on the training thread, the rest later.

    Tensors in CPU memory of up to 32,000 elements are copied; of larger ones all but the histogram
    is taken at once. Above 131,072 elements the histogram is that of a sample of about 65,536,
    scaled up. Tensors on an accelerator are reduced there, histogram included, in full.

    :meth:`add` and :meth:`finish` are to be called with autocast and dispatch modes off. They draw
    no random numbers, never wait for a device, change no global state, record nothing for autograd
    and are safe to call from several threads.

    Args:
        arena_elements: Copies and samples take as much memory as this many float32 numbers, for
            all steps together that are not reduced yet. Beyond it, tensors are measured at once.

    Raises:
        ValueError: ``arena_elements`` is negative.
    """

    def __init__(self, *, arena_elements: int = 1 << 23) -> None:
        if arena_elements < 0:
            raise ValueError(f"Measurer(arena_elements={arena_elements}): must not be negative")
        self._pool = BlockPool(4 * arena_elements // BLOCK_BYTES)
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._arena = Arena(self._pool)
        self._small: dict[FloatType, SmallTensors] = {}
        self._devices: dict[torch.device, DeviceTensors] = {}
        self._pending: list[Pending] = []

    def add(self, tensor: Tensor, *, unit_axis: int | None = None) -> int | None:
        """Measure ``tensor`` as it is now; it is not kept.

        Args:
            tensor: Of any shape, layout, numeric dtype and device. Complex numbers count with
                their magnitude, and a sparse tensor with all its zeros.
            unit_axis: Axis of the units or channels whose extremes are wanted; may be negative.

        Returns:
            The place of its record in what ``reduce`` returns. None if it cannot be measured:
            meta and fake tensors and other wrappers (take a DTensor's local tensor), nested and
            quantized ones, dtypes of less than 8 bits, uncoalesced sparse ones on an accelerator,
            anything on MPS (it has no float64).

        Raises:
            IndexError: The tensor has no axis ``unit_axis``.
        """
        values = values_of(tensor, unit_axis)
        if values is None or values.tensor.is_mps:
            return None
        with self._lock:
            pending = self._measure(values)
            if values.implied_zeros:
                pending = partial(_with_zeros, pending, values.implied_zeros)
            self._pending.append(pending)
            return len(self._pending) - 1

    def finish(self) -> Measurements:
        """Everything since the last call, to be reduced on any thread. Begins the next step."""
        with self._lock:
            measurements, devices = Measurements(self._pending, self._arena), self._devices
            self._begin()
        for device in devices.values():
            device.send()
        return measurements

    def _measure(self, values: Values) -> Pending:
        count = values.tensor.numel()
        if count == 0:
            return _empty
        if not values.tensor.is_cpu:
            return self._devices.setdefault(values.tensor.device, DeviceTensors()).add(values)
        if count > SMALL_ELEMENTS:
            return self._measure_large(values)
        return self._measure_small(values)

    def _measure_small(self, values: Values) -> Pending:
        number, count = _NUMBERS[values.working_dtype], values.tensor.numel()
        small = self._small.get(number)
        if small is None or not small.has_room(count):
            memory = self._arena.take(BATCH_ELEMENTS, number)
            if memory is None:
                alone = SmallTensors(np.empty(count, number))
                return _done(alone.record(alone.add(values)))
            small = self._small[number] = SmallTensors(memory)
        return partial(small.record, small.add(values))

    def _measure_large(self, values: Values) -> Pending:
        number, size = _NUMBERS[values.working_dtype], sample_size(values.tensor.numel())
        memory = self._arena.take(size, number)
        if memory is None:
            return _done(LargeTensor(values, self._scratch, np.empty(size, number)).record())
        return LargeTensor(values, self._scratch, memory).record


class Measurements:
    """What :class:`Measurer` took of one step, and the memory that holds it."""

    def __init__(self, pending: list[Pending], arena: Arena) -> None:
        self._pending = pending
        self._arena = arena
        self._records: list[TensorRecord] | None = None

    def reduce(self) -> list[TensorRecord]:
        """One record for each tensor that was added, in that order; waits for accelerators.

        To be called on one thread at a time. Later calls return the same.
        """
        if self._records is None:
            try:
                self._records = [record() for record in self._pending]
            finally:
                self._pending.clear()
                self._arena.release()
        return self._records

    def __del__(self) -> None:
        self._arena.release()  # of a step that is dropped unreduced


def _done(record: TensorRecord) -> Pending:
    return lambda: record


def _empty() -> TensorRecord:
    return TensorRecord(sketch=Sketch.empty())


def _with_zeros(pending: Pending, zeros: int) -> TensorRecord:
    """The record of a sparse tensor from that of its stored values."""
    return TensorRecord(sketch=pending().sketch.merge(Sketch.of_zeros(zeros)))

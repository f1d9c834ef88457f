"""Measurements of an accelerator's tensors against NumPy: on CPU tensors, and on a GPU if any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from telemetry import TensorRecord
from telemetry.measure import Measurer
from telemetry.measure.tensors import WORKING_DTYPE
from tests.helpers.device_tensors import COUNT, LAYOUTS, VALUES, assert_measured, made

FLOATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode is a prototype:UserWarning",
    "ignore:.*support is experimental:UserWarning",
)


class Elsewhere(Tensor):
    """Tensor that reports another device than the CPU, so that PyTorch's operations reduce it."""

    is_cpu = False


WAITING = {
    "_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "bincount",
    "_unique2", "unique_dim", "unique_consecutive", "_coalesce",
}  # fmt: skip


class _Waits(TorchDispatchMode):
    """Refuses operations that make the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        waits = name in WAITING
        if name in ("index", "index_put", "index_put_"):
            waits = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        assert not waits, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def _no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Device:
    """Where tensors are measured, the guard against waiting there, and the error of its sums."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.never_waits: Callable[[], AbstractContextManager[Any]]
        self.never_waits = _Waits if name == "cpu" else _no_syncs
        self.rtol = 1e-12 if name == "cpu" else 1e-6

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.as_subclass(Elsewhere) if self.name == "cpu" else tensor.to(self.name)

    def measure(self, tensors: Iterable[Tensor], axis: int | None = None) -> list[TensorRecord]:
        measurer = Measurer()
        with self.never_waits():
            for tensor in tensors:
                assert measurer.add(tensor, unit_axis=axis) is not None
            measurements = measurer.finish()
        return list(measurements.reduce().values())


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.mark.parametrize(
    "wait",
    [lambda x: x.sum().item(), lambda x: bool(x.isnan().any()), lambda x: x[x > 0]],
    ids=["item", "bool", "mask"],
)
def test_an_operation_that_waits_would_be_noticed(wait: Callable[[Tensor], object]) -> None:
    tensor = torch.ones(3)
    with pytest.raises(AssertionError, match="waits for the device"), _Waits():
        wait(tensor)


# --- values and layouts --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_statistics_equal_those_of_numpy(device: Device, dtype: torch.dtype, layout: str) -> None:
    view, axis = LAYOUTS[layout]
    tensors = [made(dtype, values) for values in VALUES]
    records = device.measure([view(device.put(tensor)) for tensor in tensors], axis)
    for record, tensor in zip(records, tensors, strict=True):
        assert_measured(record, view(tensor), axis, rtol=device.rtol)


@pytest.mark.parametrize("layout", ["flat", "64 units last", "units in the middle"])
@pytest.mark.parametrize("dtype", WORKING_DTYPE, ids=str)
def test_every_dtype_is_measured(device: Device, dtype: torch.dtype, layout: str) -> None:
    view, axis = LAYOUTS[layout]
    tensor = made(dtype, "mixed scales")
    [record] = device.measure([view(device.put(tensor))], axis)
    assert_measured(record, view(tensor), axis, rtol=device.rtol)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_16_bit_pattern_is_measured(device: Device, dtype: torch.dtype) -> None:
    """Include the upper half of a float32 number with any lower half: the edge of a bucket."""
    bits = torch.arange(1 << 16, dtype=torch.int32)
    if dtype is torch.float32:
        halves = [(bits << 16) + lower for lower in (0, 0x7FFF, 0x8000, 0x8001)]
        tensor = torch.cat(halves).view(dtype)
    else:
        tensor = bits.to(torch.int16).view(dtype)
    shuffled = tensor[torch.randperm(len(tensor))]
    for record in device.measure([device.put(tensor), device.put(shuffled)]):
        assert_measured(record, tensor, rtol=device.rtol)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("size", "axis"), [((5_000_003,), None), ((1000, 5000), 1), ((5, 1000, 1000), 0)]
)
def test_large_tensors_are_measured_in_pieces_and_to_the_same_bits_each_time(
    device: Device, size: tuple[int, ...], axis: int | None, deterministic: bool
) -> None:
    dtypes = FLOATS if device.name == "cuda" else FLOATS[:1]
    normal = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(3).relu().sub(0.25)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for tensor in map(device.put, map(normal.to, dtypes)):
            [first, second], [third] = (
                device.measure([tensor] * 2, axis),
                device.measure([tensor], axis),
            )
            assert_measured(first, tensor.as_subclass(Tensor), axis, rtol=device.rtol)
            assert_same_bits(first, second)
            assert_same_bits(first, third)
    finally:
        torch.use_deterministic_algorithms(False)


def assert_same_bits(record: TensorRecord, other: TensorRecord) -> None:
    for field in fields(record.sketch):
        one, two = getattr(record.sketch, field.name), getattr(other.sketch, field.name)
        np.testing.assert_array_equal(one, two, err_msg=field.name)
    np.testing.assert_array_equal(record.unit_min, other.unit_min)
    np.testing.assert_array_equal(record.unit_max, other.unit_max)


# --- several tensors -----------------------------------------------------------------------------


def test_many_tensors_of_any_size_and_dtype_are_measured_at_once(device: Device) -> None:
    sizes = [int(size) for size in np.geomspace(1, COUNT, 60)]
    tensors = [made(FLOATS[n % 3], "ordinary")[:size] for n, size in enumerate(sizes)]
    on_device, measurer = [device.put(tensor) for tensor in tensors], Measurer()
    with device.never_waits():
        places = measurer.add_all(on_device)
        measurements = measurer.finish()
    assert places == list(range(len(tensors)))
    for record, tensor in zip(measurements.reduce().values(), tensors, strict=True):
        assert_measured(record, tensor, rtol=device.rtol)


def test_tensors_of_a_device_and_of_the_host_are_measured_in_order(device: Device) -> None:
    tensors = [made(torch.float32, values)[:9_000] for values in ("ordinary", "zeros", "large")]
    tensors.append(torch.empty(0))
    mixed = [device.put(tensors[0]), tensors[1], device.put(tensors[2]), device.put(tensors[3])]
    for record, tensor in zip(device.measure(mixed), tensors, strict=True):
        assert_measured(record, tensor, rtol=device.rtol)


def test_a_tensor_that_cannot_be_reduced_does_not_stop_the_others() -> None:
    class TooLarge(Elsewhere):
        """Tensor whose reduction finds no memory."""

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func is torch.isnan:
                raise torch.cuda.OutOfMemoryError
            return super().__torch_function__(func, types, args, kwargs)

    measurer, tensor = Measurer(), made(torch.float32, "ordinary")
    measurer.add(tensor.as_subclass(Elsewhere))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        measurer.add(tensor.as_subclass(TooLarge))
    measurer.add(tensor)
    first, second = measurer.finish().reduce().values()
    assert_measured(first, tensor)
    assert_measured(second, tensor)


# --- on a GPU alone ------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_tensor_with_more_elements_than_32_bits_count_is_measured() -> None:
    shape = (1 << 16, 257, 1 << 8)
    if torch.cuda.mem_get_info()[0] < 20e9:
        pytest.skip("takes 9 GB of the device's memory")
    tensor = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
    tensor[-1, -1, -1] = 2
    [record] = Device("cuda").measure([tensor], 1)
    sketch, count = record.sketch, tensor.numel()
    assert (sketch.count, sketch.zero_count, sketch.sum, sketch.max) == (count, count - 1, 2, 2)
    assert sketch.counts.tolist() == [count - 1, 1]
    assert record.unit_max is not None
    assert record.unit_max.tolist() == [0] * 256 + [2]


@pytest.mark.gpu
def test_an_uncoalesced_sparse_tensor_is_not_measured_and_does_not_synchronize() -> None:
    tensor = torch.sparse_coo_tensor([[0, 0, 3]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    on_device = tensor.cuda()
    with _no_syncs():
        assert Measurer().add(on_device) is None
    [record] = Device("cuda").measure([on_device.coalesce()])
    assert_measured(record, tensor.to_dense())


@pytest.mark.gpu
def test_tensors_of_several_streams_are_measured_with_their_values_at_the_call() -> None:
    measurer = Measurer()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    with _no_syncs():
        for number, stream in enumerate(streams, start=1):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000 * number)  # the others come too early if they do
                tensor = torch.full((5, 5), float(number), device="cuda")
                measurer.add(tensor, unit_axis=1)
                tensor.zero_()
                del tensor  # its memory is given to the next
                torch.full((5, 5), -1.0, device="cuda")
        measurements = measurer.finish()
    assert measurements.reduce().rows.sum.tolist() == [25, 50, 75]


@pytest.mark.gpu
def test_tensors_of_several_gpus_are_measured() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    tensors = [torch.arange(100_000.0, device=f"cuda:{index % 2}") + index for index in range(4)]
    with torch.cuda.device(0):
        records = Device("cuda").measure(tensors)
    for record, tensor in zip(records, tensors, strict=True):
        assert_measured(record, tensor)

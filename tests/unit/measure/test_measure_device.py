"""Measurements of accelerators' tensors, on CPU tensors, against those of the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from telemetry.measure import Measurer, device
from telemetry.measure.device import DeviceRows
from telemetry.measure.tensors import WORKING_DTYPE, values_of
from telemetry.records import TensorRecord
from telemetry.records.sketch import sketch_array
from telemetry.records.tensor import Tensors
from tests.helpers.moments_close import assert_moments_close


@pytest.fixture(params=[device.PIECE_ELEMENTS, 1000], ids=["one piece", "many pieces"])
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "PIECE_ELEMENTS", request.param)


def measure(*tensors: Tensor, unit_axis: int | None = None) -> list[TensorRecord]:
    """Measure as on an accelerator: reduce everything there and copy once."""
    device_rows = DeviceRows()
    for number, tensor in enumerate(tensors):
        values = values_of(tensor, unit_axis)
        assert values is not None
        device_rows.add(values, number)
    device_rows.send()
    return [*Tensors(device_rows.numbers, device_rows.decode()).values()]


def on_host(tensor: Tensor, unit_axis: int | None = None) -> TensorRecord:
    measurer = Measurer()
    measurer.add(tensor, unit_axis=unit_axis)
    return measurer.finish().reduce()[0]


def assert_same(actual: TensorRecord, expected: TensorRecord) -> None:
    a, b = actual.sketch, expected.sketch
    assert_moments_close(a, b, rtol=1e-12)
    np.testing.assert_array_equal(a.buckets, b.buckets)
    np.testing.assert_array_equal(a.counts, b.counts)
    np.testing.assert_array_equal(actual.unit_min, expected.unit_min)
    np.testing.assert_array_equal(actual.unit_max, expected.unit_max)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def random_bits(count: int) -> Tensor:
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("dtype", WORKING_DTYPE, ids=str)
@pytest.mark.filterwarnings("ignore:.*support is experimental:UserWarning")
def test_every_dtype_is_measured_as_on_the_host(dtype: torch.dtype) -> None:
    tensor = (normal(5_000) * 3).abs().to(dtype)
    assert_same(*measure(tensor), on_host(tensor))


@pytest.mark.usefixtures("_pieces")
def test_any_bits_are_measured_exactly() -> None:
    tensor = random_bits(60_000)
    assert_same(*measure(tensor), on_host(tensor))
    assert_same(*measure(tensor), TensorRecord(sketch=sketch_array(tensor.numpy())))


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize(
    "numbers",
    [
        [float("nan")],
        [float("inf")],
        [-float("inf"), 3.4e38],
        [0.0, -0.0],
        [1e30],
        [1e-25],
        [-1e-45],
    ],
    ids=str,
)
def test_extreme_values_are_measured_as_on_the_host(numbers: list[float]) -> None:
    tensor = torch.tensor(numbers).repeat(1500)
    assert_same(*measure(tensor), on_host(tensor))


@pytest.mark.usefixtures("_pieces")
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_every_memory_layout_and_its_units_are_measured_as_on_the_host(axis: int | None) -> None:
    tensor = normal(4, 6, 30, 30).relu()
    tensor[0, 2] = float("nan")
    views = [
        tensor,
        tensor.to(memory_format=torch.channels_last),
        tensor[:, ::2, :, 3:],
        tensor[:, :1].expand(-1, 3, -1, -1),
        tensor.transpose(1, 3),
    ]
    for record, view in zip(measure(*views, unit_axis=axis), views, strict=True):
        assert_same(record, on_host(view, axis))


class Elsewhere(Tensor):
    """Tensor that reports another device than the CPU."""

    is_cpu = False


def test_tensors_of_a_device_and_of_the_host_are_measured_in_order() -> None:
    tensors = [normal(10, 3), normal(100, 700), torch.empty(0)]
    measurer = Measurer()
    for tensor in tensors:
        measurer.add(tensor.as_subclass(Elsewhere))
    measurer.add(tensors[0])
    records = measurer.finish().reduce().values()
    for tensor, record in zip([*tensors, tensors[0]], records, strict=True):
        assert_same(record, TensorRecord(sketch=sketch_array(tensor.numpy())))


def test_a_tensor_that_cannot_be_reduced_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(tensor: object, axis: int | None) -> Tensor:
        raise torch.cuda.OutOfMemoryError

    measurer = Measurer()
    monkeypatch.setattr(device, "_statistics", fail)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        measurer.add(normal(5).as_subclass(Elsewhere))
    measurer.add(normal(5))
    (record,) = measurer.finish().reduce().values()
    assert record.sketch.count == 5


def test_the_histogram_is_of_all_elements() -> None:
    tensor = normal(200_000)
    (record,) = measure(tensor)
    assert_same(record, TensorRecord(sketch=sketch_array(tensor.numpy())))


def test_deterministic_mode_does_not_change_measurements() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        (record,) = measure(normal(5_000))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same(record, on_host(normal(5_000)))

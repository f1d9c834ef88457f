"""Measurements of tensors against NumPy in float64, on the CPU and as on an accelerator."""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from math import nan
from operator import methodcaller
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from telemetry import Sketch, TensorRecord
from telemetry.measure import Measurements, fingerprint
from telemetry.measure.tensors import FULL_ELEMENTS, WORKING_DTYPE
from telemetry.records.buckets import bucket_indices
from telemetry.records.sketch import sketch_array
from tests.helpers.launches import Launches
from tests.helpers.moments_close import assert_moments_close
from tests.helpers.require import require

ALL_SIZES = pytest.mark.parametrize("size", [700, 40_000, 300_000])  # the last ones are sampled
FLOATS = [torch.float32, torch.bfloat16, torch.float16]

pytestmark = pytest.mark.filterwarnings(
    "ignore:Synchronization debug mode is a prototype:UserWarning",
    "ignore:.*support is experimental:UserWarning",
)


# --- tensors of every dtype and layout, and their statistics by NumPy ---

COUNT = 61_440

# Of an accelerator's tensor, and of the same one in CPU memory, the view that is measured and its
# axis of units.
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int | None]] = {
    "flat": (lambda x: x, None),
    "no element": (lambda x: x[:0], None),
    "one element": (lambda x: x[9:10], None),
    "a number": (lambda x: x[9], None),
    "not aligned": (lambda x: x[1:-1], None),
    "every third": (lambda x: x[::3], None),
    "few units last": (lambda x: x[:60_004].view(-1, 7)[1:], 1),
    "64 units last": (lambda x: x.view(-1, 64), 1),
    "768 units last": (lambda x: x.view(-1, 8, 768), -1),
    "15,360 units last": (lambda x: x.view(-1, 15_360), 1),
    "units last, not aligned": (lambda x: x[3 : 3 + 600 * 100].view(600, 100), 1),
    "units first": (lambda x: x.view(60, -1), 0),
    "units in the middle": (lambda x: x.view(8, 16, 480), 1),
    "7 × 7 in the middle": (lambda x: x[: 19 * 64 * 49].view(19, 64, 7, 7), 1),
    "channels_last": (lambda x: x.view(8, 16, 40, 12).permute(0, 3, 1, 2), 1),
    "transposed": (lambda x: x.view(240, 256).t(), 1),
    "columns": (lambda x: x.view(240, 256)[:, 3:200], 1),
    "expanded": (lambda x: x[:256].expand(3, 256), 1),
    "negative bit": (lambda x: torch._neg_view(x).view(240, 256), 1),
}

SPECIAL = [nan, float("inf"), -float("inf"), 3.4e38, -1e30, 65504.0, 1e-25, 1e-45, 0.0, -0.0]

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "small": lambda x: x * 1e-8,
    "mixed scales": lambda x: x * (torch.arange(COUNT) % 24 * -1.0).exp2(),
    "large": lambda x: x * 1e15,
    "half zeros": lambda x: x.relu(),
    "zeros": torch.zeros_like,
    "zeros of both signs": lambda x: x * 0.0,
    "special ones among others": lambda x: x.index_copy(
        0, torch.arange(len(SPECIAL) * 99)[::97][: len(SPECIAL)], torch.tensor(SPECIAL)
    ),
    "special ones": lambda x: torch.tensor(SPECIAL * (COUNT // len(SPECIAL))),
    "all NaN": lambda x: x * nan,
    "any bits": lambda x: torch.from_numpy(
        np.random.default_rng(0).integers(0, 1 << 32, COUNT, dtype=np.uint32).view(np.float32)
    ),
}


def made(dtype: torch.dtype, values: str) -> Tensor:
    """Numbers in CPU memory, always the same, ``[COUNT]``."""
    normal = torch.randn(COUNT, generator=torch.Generator().manual_seed(0))
    x = VALUES[values](normal)
    if dtype.is_complex:
        return torch.complex(x.double(), x.double().flip(0)).to(dtype)
    if dtype.is_floating_point:
        return x.to(dtype)
    return (x.nan_to_num(0, 0, 0).clamp(-9, 9) * 10).abs().to(dtype)


def to_float64(tensor: Tensor) -> NDArray[Any]:
    """Return the values of any dense tensor; magnitudes of complex numbers."""
    tensor = tensor.detach().cpu().clone()  # also of zeros that have no memory
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs().numpy()
    if tensor.is_floating_point() and tensor.element_size() < 8:
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.float64).resolve_neg().numpy()


def assert_measured(
    record: TensorRecord,
    tensor: Tensor,
    axis: int | None = None,
    *,
    rtol: float = 1e-6,
    sampled: bool = False,
) -> None:
    """Compare a measured tensor with NumPy's float64 values.

    Sums may differ by ``rtol``: a device may add up a few neighbours in float32. No histogram of
    a sample is compared.
    """
    values = to_float64(tensor)
    sketch, expected = record.sketch, sketch_array(values)
    assert_moments_close(sketch, expected, rtol=rtol)
    if not sampled:
        np.testing.assert_array_equal(sketch.buckets, expected.buckets)
        np.testing.assert_array_equal(sketch.counts, expected.counts)
    if axis is None or not values.size:
        assert record.unit_min is record.unit_max is None
        return
    others = tuple(other for other in range(values.ndim) if other != axis % values.ndim)
    with np.errstate(invalid="ignore"):  # NaN
        low, high = values.min(others), values.max(others)
    for found, wanted in ((record.unit_min, low), (record.unit_max, high)):
        assert found is not None
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, wanted.astype(np.float32))


# --- devices ---


class Elsewhere(Tensor):
    """Tensor that reports another device than the CPU, so that PyTorch's operations reduce it."""

    is_cpu = False


def _modes_keep_types() -> bool:
    """Whether results in a dispatch mode have the type of a subclass; PyTorch 2.4 raises."""
    try:
        with Launches():
            return type(torch.zeros(1).as_subclass(Elsewhere).detach()) is Elsewhere
    except RuntimeError:
        return False


@contextmanager
def _no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Device:
    """A place of measuring, the guard against waiting there, and the error of its sums."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.never_waits: Callable[[], AbstractContextManager[Any]]
        elsewhere = Launches if _modes_keep_types() else nullcontext
        guards = {"host": nullcontext, "elsewhere": elsewhere, "cuda": _no_syncs}
        self.never_waits = guards[name]
        self.rtol = 1e-6 if name == "cuda" else 1e-12

    def put(self, tensor: Tensor) -> Tensor:
        if self.name == "host":
            return tensor
        return tensor.cuda() if self.name == "cuda" else tensor.as_subclass(Elsewhere)

    def measure(self, tensors: Iterable[Tensor], axis: int | None = None) -> list[TensorRecord]:
        measurements = Measurements()
        with self.never_waits():
            for tensor in tensors:
                assert measurements.add(tensor, unit_axis=axis) is not None
            measurements.finish()
        return list(measurements.reduce().values())


@pytest.fixture(params=["host", "elsewhere", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


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
    halves = [(bits << 16) + lower for lower in (0, 0x7FFF, 0x8000, 0x8001)]
    patterns = [bits.to(torch.int16)] if dtype.itemsize == 2 else halves
    tensors = [pattern.view(dtype)[torch.randperm(1 << 16)] for pattern in patterns]
    for record, tensor in zip(device.measure(map(device.put, tensors)), tensors, strict=True):
        assert_measured(record, tensor, rtol=device.rtol)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "axis", "deterministic"),
    [((5_000_003,), None, False), ((1000, 5000), 1, True), ((5, 1000, 1000), 0, False)],
)
def test_large_tensors_are_measured_in_pieces_and_to_the_same_bits_each_time(
    device: Device, size: tuple[int, ...], axis: int | None, deterministic: bool
) -> None:
    normal = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul(3).relu().sub(0.25)
    torch.use_deterministic_algorithms(deterministic)
    try:
        for dtype in FLOATS if device.name == "cuda" else FLOATS[:1]:
            tensor = normal.to(dtype)
            first, second = device.measure([device.put(tensor)] * 2, axis)
            [third] = device.measure([device.put(tensor)], axis)
            if device.name == "host":
                assert_measured(first, tensor, axis, rtol=device.rtol, sampled=True)
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
    on_device, measurements = [device.put(tensor) for tensor in tensors], Measurements()
    with device.never_waits():
        places = measurements.add_all(on_device)
        measurements.finish()
    records = measurements.reduce()
    assert sorted(places) == list(records)
    for place, tensor in zip(places, tensors, strict=True):
        assert_measured(records[place], tensor, rtol=device.rtol)


def test_tensors_of_a_device_and_of_the_host_are_measured_in_order(device: Device) -> None:
    tensors = [made(torch.float32, values)[:9_000] for values in ("ordinary", "zeros", "large")]
    tensors.append(torch.empty(0))
    mixed = [device.put(tensors[0]), tensors[1], device.put(tensors[2]), device.put(tensors[3])]
    for record, tensor in zip(device.measure(mixed), tensors, strict=True):
        assert_measured(record, tensor, rtol=device.rtol)


# --- values on the host --------------------------------------------------------------------------


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def measure(tensor: Tensor, unit_axis: int | None = None) -> TensorRecord:
    (record,) = Device("host").measure([tensor], unit_axis)
    return record


def assert_exact(tensor: Tensor, axis: int | None = None) -> None:
    """Measure a tensor of the host, and compare all statistics but the histogram of a sample."""
    record = measure(tensor, axis)
    assert_measured(record, tensor, axis, rtol=1e-12, sampled=tensor.numel() > FULL_ELEMENTS)


def distance(sketch: Sketch, tensor: Tensor) -> float:
    """Largest difference of the two cumulative distributions over the buckets."""
    total = np.zeros((2, 4079))
    for row, part in zip(total, (sketch, sketch_array(tensor.numpy())), strict=True):
        row[part.buckets.astype(int) + 2039] = part.counts / part.counts.sum()
    return float(np.abs(np.diff(total.cumsum(axis=1), axis=0)).max())


@given(arrays(np.float32, st.integers(1, 60), elements=st.floats(width=32)))
def test_any_float32_numbers_are_measured_exactly(x: NDArray[np.float32]) -> None:
    assert_exact(torch.from_numpy(x))


@pytest.mark.slow
@given(st.data())
def test_any_strides_are_measured_exactly(data: st.DataObject) -> None:
    """Slices, permutations and channels_last of any shape and dtype, without elements, too."""
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int16]))
    tensor = (100 * normal(*shape)).to(dtype)
    if tensor.ndim == 4 and data.draw(st.booleans()):
        tensor = tensor.to(memory_format=torch.channels_last)
    tensor = tensor.permute(data.draw(st.permutations(range(tensor.ndim))))
    for axis in range(tensor.ndim):
        first, step = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * axis + (slice(first, None, step),)]
    assert_exact(tensor, data.draw(st.integers(0, tensor.ndim - 1)))


def test_complex_numbers_count_by_magnitude_even_beyond_float32() -> None:
    assert_exact(torch.tensor([3 + 4j, 0, 2.0**127 * (1 + 1j)]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(normal(4), 0.1, 0, torch.quint8),
        lambda: torch.empty(3, dtype=require("torch.float4_e2m1fn_x2")),
        lambda: torch.empty(3, dtype=require("torch.int4")),
        lambda: torch.empty(3, dtype=torch.bits8),
        lambda: torch.nested.nested_tensor([normal(2), normal(3)]),
        lambda: torch.nested.nested_tensor([normal(2), normal(3)], layout=torch.jagged),
        lambda: FakeTensorMode().from_tensor(torch.empty(3)),
    ],
    ids=["meta", "quantized", "float4", "int4", "bits", "nested", "jagged", "fake"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_numbers_are_refused(make: Callable[[], Tensor]) -> None:
    measurements = Measurements()
    assert measurements.add(make()) is None
    assert measurements.add(normal(3)) == 0
    assert len(measurements.finish().reduce()) == 1


NUMBERS = [
    [math.nan], [math.inf], [-math.inf, math.inf], [0.0], [-0.0], [1e-45, -3e-40],
    [math.nan, 1.0, math.inf, -2.0], [1e30, -2e30], [3.4e38], [1e-25, -3e-25], [0.1], [5.0, 6.0],
    [-5.0],
]  # fmt: skip


@ALL_SIZES
@pytest.mark.parametrize("numbers", NUMBERS, ids=str)
def test_uniform_and_extreme_values_are_measured_exactly(numbers: list[float], size: int) -> None:
    tensor = torch.tensor(numbers).repeat(size // len(numbers))
    assert_exact(tensor)
    sketch = measure(tensor).sketch
    np.testing.assert_array_equal(sketch.buckets, sketch_array(tensor.numpy()).buckets)
    np.testing.assert_allclose(sketch.counts.sum(), sketch.finite_count)


@ALL_SIZES
def test_float64_is_not_rounded(size: int) -> None:
    tensor = 1 + 1e-12 * normal(size).double()
    sketch = measure(tensor).sketch
    assert (sketch.min, sketch.max) == (tensor.min().item(), tensor.max().item())
    np.testing.assert_allclose(sketch.mean - 1, tensor.numpy().mean() - 1, atol=1e-15)
    for scale in (1e150, 1e-200, 1e300):
        assert_exact(tensor * scale)


def test_more_elements_in_one_bucket_than_float32_can_count_are_counted() -> None:
    count = (1 << 24) + 3
    sketch = measure(torch.ones(count)).sketch
    assert (sketch.count, sketch.sum, sketch.sum_squares) == (count, count, count)
    assert sketch.counts.tolist() == [count]
    assert measure(torch.zeros(1).expand(count)).sketch.zero_count == count


HOST_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(0, 2),
    "every other column": lambda t: t[..., ::2],
    "flipped": lambda t: t.flip(1)[:, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "one number expanded": lambda t: t[0, 0, 0, 0].expand(t.shape),
    "parameter": lambda t: nn.Parameter(t.clone()),
    "negative bit, not dense": lambda t: torch.complex(t, t).conj().imag,
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
}


@pytest.mark.slow
@ALL_SIZES
@pytest.mark.parametrize("axis", [None, 1, -1, 0])
@pytest.mark.parametrize("layout", HOST_LAYOUTS)
def test_every_memory_layout_is_measured(layout: str, axis: int | None, size: int) -> None:
    tensor = HOST_LAYOUTS[layout](normal(6, 5, size // 150, 10).relu())
    assert_exact(tensor, axis)
    if tensor.numel() > FULL_ELEMENTS:
        values = torch.from_numpy(to_float64(tensor))
        assert distance(measure(tensor, axis).sketch, values) < 0.01


@pytest.mark.parametrize(
    "convert",
    [
        ("to_sparse",), ("to_sparse", 1), ("to_sparse_csr",), ("to_sparse_csc",),
        ("to_sparse_bsr", (2, 2)), ("to_mkldnn",),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("width", [10, 1000])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_count_their_zeros(convert: tuple[Any, ...], width: int) -> None:
    tensor = torch.where(normal(60, width) > 1, normal(60, width), 0)
    assert_measured(measure(methodcaller(*convert)(tensor), unit_axis=1), tensor, rtol=1e-12)


def test_uncoalesced_sparse_tensors_are_added_up_in_a_copy() -> None:
    tensor = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    assert_measured(measure(tensor), torch.tensor([3.0, 0, 4, 0, 0]), rtol=1e-12)
    assert not tensor.is_coalesced()


# --- samples of large tensors --------------------------------------------------------------------


def test_a_large_tensor_has_exact_moments_and_a_sampled_histogram() -> None:
    tensor = normal(1_000_000).relu()
    assert_exact(tensor)
    sketch = measure(tensor).sketch
    assert distance(sketch, tensor) < 0.008
    np.testing.assert_allclose(sketch.counts.sum(), tensor.numel())
    assert sketch.counts[sketch.buckets == 0] == sketch.zero_count


@pytest.mark.parametrize("columns", [256, 768, 1000])
def test_samples_are_spread_over_all_columns(columns: int) -> None:
    tensor = normal(1_000_000 // columns, columns) * torch.logspace(-3, 3, columns)
    assert distance(measure(tensor).sketch, tensor) < 0.015


@pytest.mark.parametrize("extreme", [1e6, -1e6, float("inf"), float("nan")])
def test_one_outlier_is_never_missed(extreme: float) -> None:
    tensor = torch.zeros(500_000)
    tensor[123_457] = extreme
    assert_measured(measure(tensor), tensor, rtol=1e-12)


# --- units ---------------------------------------------------------------------------------------

UNITS = [
    ((64, 10), -1), ((16,), 0), ((1, 1), 1), ((300, 7), 1), ((30_000, 3), -1), ((5_000, 48), -1),
    ((700, 300), -1), ((90, 3000), 1), ((8, 16, 7, 7), 1), ((33, 64, 4, 4), 1),
    ((3, 5, 100, 101), 1), ((2, 3, 400, 500), 1), ((1, 2, 600, 700), 1), ((2, 70_000, 3), 1),
    ((200, 300), 0),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "axis"), UNITS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_extremes_of_each_unit_are_exact(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    assert_exact(normal(*shape).relu().to(dtype), axis)


@pytest.mark.parametrize(
    ("count", "width", "inner"),
    [
        shape
        for shape in itertools.product([3, 299], [1, 3, 48, 255], [1, 3, 80])
        if math.prod(shape) < 250_000  # the largest take seconds and add no case
    ],
)
def test_extremes_in_any_row_are_found(count: int, width: int, inner: int) -> None:
    x, wanted = torch.zeros(count, width, inner), np.arange(width) - 10.0
    for row in {*range(0, count, 17), count - 1}:
        x[row] = torch.arange(float(width))[:, None] - 10
        record = measure(x, unit_axis=1)
        np.testing.assert_array_equal(record.unit_min, np.minimum(wanted, 0))
        np.testing.assert_array_equal(record.unit_max, np.maximum(wanted, 0))
        x[row] = float("nan")
        assert np.isnan(measure(x, unit_axis=1).unit_min).all()
        x[row] = 0


def test_dead_units_and_units_with_nan_are_distinguished(device: Device) -> None:
    tensor = normal(700, 4)
    tensor[:, 1] = 0
    tensor[3, 2] = float("nan")
    [record] = device.measure([device.put(tensor)], 1)
    assert record.unit_min is not None
    assert np.isnan(record.unit_min).tolist() == [False, False, True, False]
    assert record.dead_fraction == 0.25
    assert record.zero_units.tolist() == [False, True, False, False]
    assert record.sketch.nan_count == 1


def test_a_missing_axis_is_named() -> None:
    with pytest.raises(IndexError, match=r"unit_axis=2: the tensor has 2 axes"):
        Measurements().add(normal(2, 3), unit_axis=2)


# --- steps and memory ----------------------------------------------------------------------------


@ALL_SIZES
def test_the_values_are_those_at_the_time_of_adding_and_no_tensor_is_kept(size: int) -> None:
    tensor = torch.ones(size)
    measurements = Measurements()
    indices, version = [measurements.add(tensor)], tensor._version
    tensor.data.mul_(7)
    assert tensor._version == version  # PyTorch did not notice
    indices.append(measurements.add(tensor))
    reference = weakref.ref(tensor.untyped_storage())
    del tensor
    assert reference() is None
    measurements.finish()
    records = measurements.reduce()
    assert indices == [0, 1]
    assert records.rows.min.tolist() == records.rows.max.tolist() == [1, 7]
    assert records[0].sketch.buckets.tolist() == [int(bucket_indices(np.array(1.0)))]
    assert measurements.reduce() is records


@ALL_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_kurtosis_all_other_statistics_are_the_same(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, 2).to(dtype)
    tensor[-1, 0] = torch.nan
    for x in (tensor, tensor.T, tensor[:, 0]):  # the last one has gaps
        measurements = Measurements()
        measurements.add(x)
        measurements.add(x, powers=2)
        measurements.add_all([x], powers=2)
        known, *others = (vars(record.sketch) for record in measurements.finish().reduce().values())
        for unknown in others:
            cubes = {name: unknown.pop(name) for name in ("sum_cubes", "sum_fourth_powers")}
            assert np.isnan([*cubes.values()]).all()
            for name, value in unknown.items():
                np.testing.assert_array_equal(value, known[name], err_msg=name)


def test_threads_measure_and_reduce_at_once() -> None:
    """Each adds tensors to one step; others reduce the steps before."""
    sizes = (10, 40_000, 150_000) * 10

    def add(measurements: Measurements, value: float) -> list[int | None]:
        return [measurements.add(torch.full((n,), value)) for n in sizes]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(5) as pool:
            steps = []
            for _ in range(4):
                measurements = Measurements()
                places = [*pool.map(partial(add, measurements), (1.0, 2.0, 3.0, 4.0))]
                steps.append((places, pool.submit(measurements.finish().reduce)))
    finally:
        sys.setswitchinterval(interval)
    for places, reduced in steps:
        low, high = reduced.result().rows.min, reduced.result().rows.max
        assert sorted(itertools.chain(*places)) == list(range(4 * len(sizes)))
        for number, ours in enumerate(places, start=1):
            assert {*low[ours], *high[ours]} == {number}


@ALL_SIZES
def test_measuring_changes_no_tensor_and_no_random_state(size: int) -> None:
    tensor = nn.Parameter(normal(size // 10, 10))
    state, version = torch.get_rng_state(), tensor._version
    before = tensor.detach().clone()
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        measure(tensor, unit_axis=1)
        measure(tensor * 2j)
        measure(tensor[:, 1:])
        measure(tensor.relu().to_sparse())
    finally:
        torch.use_deterministic_algorithms(was)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(tensor, before)
    assert tensor._version == version


# --- fingerprints --------------------------------------------------------------------------------


def fingerprint_of(tensor: Tensor) -> float:
    for other in (torch.empty(3, device="meta"), torch.eye(3).to_sparse()):
        assert list(fingerprint(other)) == []  # of tensors without dense values
    [value] = fingerprint(tensor)
    assert value.shape == ()
    return float(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 3, 8, 8),
        torch.randn(500_000, dtype=torch.float64),
        torch.randint(50_000, (16, 128)),
        torch.rand(64) < 0.5,
        torch.randn(64, dtype=torch.complex64),
        torch.randn(6, 8).to(torch.bfloat16).t(),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_equal_values_have_equal_fingerprints_and_others_differ(tensor: Tensor) -> None:
    """The address does not count."""
    for offset in range(8):
        memory = torch.empty(tensor.numel() + offset, dtype=tensor.dtype)
        moved = memory[offset:].view(tensor.shape).copy_(tensor)
        assert fingerprint_of(moved) == fingerprint_of(tensor)
    assert fingerprint_of(tensor) != fingerprint_of(tensor.flip(0))
    assert fingerprint_of(tensor) != fingerprint_of(torch.roll(tensor, 1, 0))


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
        assert Measurements().add(on_device) is None
    [record] = Device("cuda").measure([on_device.coalesce()])
    assert_measured(record, tensor.to_dense())


@pytest.mark.gpu
def test_tensors_of_several_streams_are_measured_with_their_values_at_the_call() -> None:
    measurements = Measurements()
    streams = [torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()]
    with _no_syncs():
        for number, stream in enumerate(streams, start=1):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(100_000_000 * number)  # the others come too early if they do
                tensor = torch.full((5, 5), float(number), device="cuda")
                measurements.add(tensor, unit_axis=1)
                tensor.zero_()
                del tensor  # its memory is given to the next
                torch.full((5, 5), -1.0, device="cuda")
        measurements.finish()
    assert measurements.reduce().rows.sum.tolist() == [25, 50, 75]

"""Measurements of tensors against NumPy in float64, on the CPU and as on an accelerator."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from telemetry import Sketch, TensorRecord
from telemetry.measure import Measurer, block_sample, fingerprint
from telemetry.measure.tensors import FULL_ELEMENTS, WORKING_DTYPE, pieces
from telemetry.records.buckets import bucket_indices
from telemetry.records.sketch import SAMPLE_ELEMENTS, sketch_array
from telemetry.records.tensor import Tensors
from tests.helpers.device_tensors import COUNT, LAYOUTS, VALUES, assert_measured, made, to_float64
from tests.helpers.require import require

ALL_SIZES = pytest.mark.parametrize("size", [700, 40_000, 300_000])  # the last ones are sampled
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


def _modes_keep_types() -> bool:
    """Whether results in a dispatch mode have the type of a subclass; PyTorch 2.4 raises."""
    try:
        with _Waits():
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
        elsewhere = _Waits if _modes_keep_types() else nullcontext
        guards = {"host": nullcontext, "elsewhere": elsewhere, "cuda": _no_syncs}
        self.never_waits = guards[name]
        self.rtol = 1e-6 if name == "cuda" else 1e-12

    def put(self, tensor: Tensor) -> Tensor:
        if self.name == "host":
            return tensor
        return tensor.cuda() if self.name == "cuda" else tensor.as_subclass(Elsewhere)

    def measure(self, tensors: Iterable[Tensor], axis: int | None = None) -> list[TensorRecord]:
        measurer = Measurer()
        with self.never_waits():
            for tensor in tensors:
                assert measurer.add(tensor, unit_axis=axis) is not None
            measurements = measurer.finish()
        return list(measurements.reduce().values())


@pytest.fixture(params=["host", "elsewhere", pytest.param("cuda", marks=pytest.mark.gpu)])
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
            sampled = device.name == "host"
            assert_measured(first, tensor, axis, rtol=device.rtol, sampled=sampled)
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
        lambda: fake_tensor(),
    ],
    ids=["meta", "quantized", "float4", "int4", "bits", "nested", "jagged", "fake"],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_plain_numbers_are_refused(make: Callable[[], Tensor]) -> None:
    measurer = Measurer()
    assert measurer.add(make()) is None
    assert measurer.add(normal(3)) == 0
    assert len(measurer.finish().reduce()) == 1


def fake_tensor() -> Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.empty(3)


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
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "every other row": lambda t: t[::2],
    "every other column": lambda t: t[..., ::2],
    "flipped": lambda t: t.flip(1)[:, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "one number expanded": lambda t: t[0, 0, 0, 0].expand(t.shape),
    "with an offset": lambda t: t[1:],
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
        lambda t: t.to_sparse(),
        lambda t: t.to_sparse(1),
        lambda t: t.to_sparse_csr(),
        lambda t: t.to_sparse_csc(),
        lambda t: t.to_sparse_bsr((2, 2)),
        lambda t: t.to_mkldnn(),
    ],
    ids=["coo", "hybrid coo", "csr", "csc", "bsr", "mkldnn"],
)
@pytest.mark.parametrize("width", [10, 1000])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_count_their_zeros(convert: Callable[[Tensor], Tensor], width: int) -> None:
    tensor = torch.where(normal(60, width) > 1, normal(60, width), 0)
    assert_measured(measure(convert(tensor), unit_axis=1), tensor, rtol=1e-12)


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


def test_sampled_counts_add_up_with_infinities_and_huge_numbers() -> None:
    tensor = normal(500_000)
    tensor[::3] = float("inf")
    tensor[1::3] = 3.4e38
    tensor[2::30] = float("nan")
    assert_exact(tensor)
    sketch = measure(tensor).sketch
    np.testing.assert_allclose(sketch.counts.sum(), sketch.finite_count)
    assert bucket_indices(np.array(3.4e38)) in sketch.buckets


def test_block_sample_is_a_view_of_evenly_spread_runs() -> None:
    tensor = torch.arange(1_000_000, dtype=torch.float32).view(1000, 1000)
    sample = block_sample(nn.Parameter(tensor))
    assert sample.shape[1] == 16
    assert 0.9 * SAMPLE_ELEMENTS < sample.numel() <= SAMPLE_ELEMENTS + 16
    assert sample.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    starts = sample[:, 0].diff().unique()
    assert starts.numel() == 1
    assert tensor.numel() - sample[-1, -1] <= starts.item()
    assert not np.any(starts.item() % np.arange(2, 15) == 0)
    assert torch.equal(block_sample(tensor.T), sample)
    assert block_sample(tensor[:, ::2]).numel() > 0.9 * SAMPLE_ELEMENTS
    flat = tensor.view(-1)
    assert block_sample(flat[:SAMPLE_ELEMENTS]).shape == (SAMPLE_ELEMENTS,)
    assert block_sample(flat[: SAMPLE_ELEMENTS + 1]).shape[1] == 16


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
    assert record.sketch.nan_count == 1


def test_a_missing_axis_is_named() -> None:
    with pytest.raises(IndexError, match=r"unit_axis=2: the tensor has 2 axes"):
        Measurer().add(normal(2, 3), unit_axis=2)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4), st.integers(1, 50))
def test_pieces_cover_every_element_once_and_in_order(shape: list[int], limit: int) -> None:
    numbers = np.arange(np.prod(shape)).reshape(shape)
    parts = [numbers[index] for index in pieces(shape, limit)]
    assert all(0 < part.size <= limit for part in parts)
    assert all(part.flags.c_contiguous for part in parts)
    np.testing.assert_array_equal(
        np.concatenate([part.reshape(-1) for part in parts]), numbers.flat
    )


# --- steps and memory ----------------------------------------------------------------------------


@ALL_SIZES
def test_the_values_are_those_at_the_time_of_adding_and_no_tensor_is_kept(size: int) -> None:
    tensor = torch.ones(size)
    measurer = Measurer()
    indices, version = [measurer.add(tensor)], tensor._version
    tensor.data.mul_(7)
    assert tensor._version == version  # PyTorch did not notice
    indices.append(measurer.add(tensor))
    reference = weakref.ref(tensor.untyped_storage())
    del tensor
    assert reference() is None
    measurements = measurer.finish()
    records = measurements.reduce()
    assert indices == [0, 1]
    assert records.rows.min.tolist() == records.rows.max.tolist() == [1, 7]
    assert records[0].sketch.buckets.tolist() == [int(bucket_indices(np.array(1.0)))]
    assert measurements.reduce() is records
    assert not measurer.finish().reduce()


@ALL_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_without_kurtosis_all_other_statistics_are_the_same(size: int, dtype: torch.dtype) -> None:
    tensor = torch.randn(size, 2).to(dtype)
    tensor[-1, 0] = torch.nan
    for x in (tensor, tensor.T, tensor[:, 0]):  # the last one has gaps
        measurer = Measurer()
        measurer.add(x)
        measurer.add(x, powers=2)
        measurer.add_all([x], powers=2)
        known, *others = (vars(record.sketch) for record in measurer.finish().reduce().values())
        for unknown in others:
            cubes = {name: unknown.pop(name) for name in ("sum_cubes", "sum_fourth_powers")}
            assert np.isnan([*cubes.values()]).all()
            for name, value in unknown.items():
                np.testing.assert_array_equal(value, known[name], err_msg=name)


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Switch threads every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("often_interrupted")
def test_steps_are_reduced_on_other_threads_while_the_next_is_measured() -> None:
    measurer = Measurer()
    results: dict[int, Tensors[int]] = {}
    threads = []
    for step in range(8):
        for size in (*[3_000] * 30, 40_000):
            measurer.add(torch.full((size,), float(step + 1)))
        reduce = measurer.finish().reduce
        thread = threading.Thread(target=lambda i, f: results.update({i: f()}), args=(step, reduce))
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    for step, records in results.items():
        assert records.rows.min.tolist() == records.rows.max.tolist() == [step + 1] * 31
    assert len(results) == 8


@pytest.mark.usefixtures("often_interrupted")
def test_several_threads_can_add_at_once() -> None:
    measurer = Measurer()
    indices: dict[float, list[int | None]] = {}

    def add(value: float) -> None:
        sizes = (10, 40_000, 150_000) * 10
        indices[value] = [measurer.add(torch.full((size,), value)) for size in sizes]

    threads = [threading.Thread(target=add, args=(float(value),)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = measurer.finish().reduce()
    assert sorted(i for ours in indices.values() for i in ours if i is not None) == list(range(120))
    for value, ours in indices.items():
        assert {records[i].sketch.max for i in ours if i is not None} == {value}


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
)
def test_equal_values_have_equal_fingerprints_and_others_differ(tensor: Tensor) -> None:
    assert fingerprint_of(tensor) == fingerprint_of(tensor.clone())
    assert fingerprint_of(tensor) != fingerprint_of(tensor.flip(0))
    assert fingerprint_of(tensor) != fingerprint_of(torch.roll(tensor, 1, 0))


def test_a_copy_at_another_address_has_the_same_fingerprint() -> None:
    values = torch.randn(1001)
    for offset in range(8):
        moved = torch.empty(1001 + offset)[offset:].copy_(values)
        assert fingerprint_of(moved) == fingerprint_of(values)


def test_tensors_without_dense_values_have_no_fingerprint_and_empty_ones_have() -> None:
    assert list(fingerprint(normal(3, 3).to_sparse())) == []
    assert list(fingerprint(torch.empty(3, device="meta"))) == []
    assert fingerprint_of(torch.empty(0, 3)) == 0


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

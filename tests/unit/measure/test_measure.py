"""Measurements of tensors on the CPU against NumPy in float64."""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor, nn

from telemetry.measure import Measurer, block_sample
from telemetry.measure.tensors import FULL_ELEMENTS, WORKING_DTYPE, pieces
from telemetry.records import TensorRecord
from telemetry.records.buckets import bucket_indices
from telemetry.records.sketch import SAMPLE_ELEMENTS, Sketch, sketch_array
from telemetry.records.tensor import Tensors
from tests.helpers.moments_close import assert_moments_close
from tests.helpers.require import require

SMALL, LARGE, SAMPLED = 700, 40_000, 300_000
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])
ALL_SIZES = pytest.mark.parametrize("size", [SMALL, LARGE, SAMPLED])
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1.42e-39, 1e-38, 3.4e38, -3.4e38]
NONFINITE = [float("nan"), float("inf"), float("-inf"), float("inf")]


@pytest.fixture
def often_interrupted() -> Iterator[None]:
    """Switch threads every microsecond."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def measure(tensor: Tensor, unit_axis: int | None = None) -> TensorRecord:
    measurer = Measurer()
    assert measurer.add(tensor, unit_axis=unit_axis) == 0
    (record,) = measurer.finish().reduce().values()
    return record


def to_float64(tensor: Tensor) -> NDArray[np.float64]:
    """Return the values of any dense tensor; magnitudes of complex numbers."""
    if tensor.is_complex():
        return tensor.to(torch.complex128).abs().numpy()
    if tensor.is_floating_point() and tensor.element_size() < 8:
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.float64).numpy()


def assert_moments(sketch: Sketch, values: NDArray[np.floating]) -> None:
    """Check all statistics of ``values`` except the histogram."""
    assert_moments_close(sketch, sketch_array(values), rtol=1e-12)


def assert_exact(sketch: Sketch, values: NDArray[np.floating]) -> None:
    """Check all statistics of ``values`` and the histogram."""
    assert_moments(sketch, values)
    expected = sketch_array(values)
    np.testing.assert_array_equal(sketch.buckets, expected.buckets)
    np.testing.assert_array_equal(sketch.counts, expected.counts)


def distance(sketch: Sketch, values: NDArray[np.floating]) -> float:
    """Largest difference of the two cumulative distributions over the buckets."""
    exact = sketch_array(values)
    total = np.zeros((2, 4079))
    for row, part in zip(total, (sketch, exact), strict=True):
        row[part.buckets.astype(int) + 2039] = part.counts / part.counts.sum()
    return float(np.abs(np.diff(total.cumsum(axis=1), axis=0)).max())


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- dtypes --------------------------------------------------------------------------------------


def values_for(dtype: torch.dtype, size: int) -> Tensor:
    """Numbers that use the range of ``dtype``, special ones among them."""
    if dtype == torch.bool:
        return normal(size) > 0
    if dtype.is_complex:
        parts = torch.cat([normal(size) * 100, torch.tensor(SPECIAL + NONFINITE)])
        return torch.complex(parts, parts.flip(0)).to(dtype)
    if dtype.is_floating_point:
        special = torch.tensor(SPECIAL + NONFINITE)
        return torch.cat([normal(size) * 10 ** normal(size), special]).to(dtype)
    info = torch.iinfo(dtype)
    numbers = np.random.default_rng(0).integers(
        info.min, info.max, size, dtype=str(dtype).removeprefix("torch."), endpoint=True
    )
    numbers[: size // 3] = 0
    return torch.from_numpy(numbers)


@SIZES
@pytest.mark.parametrize("dtype", WORKING_DTYPE, ids=str)
@pytest.mark.filterwarnings("ignore:.*support is experimental:UserWarning")
def test_every_numeric_dtype_is_measured_exactly(dtype: torch.dtype, size: int) -> None:
    tensor = values_for(dtype, size)
    assert_exact(measure(tensor).sketch, to_float64(tensor))


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_pattern_is_measured_exactly(dtype: torch.dtype, size: int) -> None:
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    for part in bits.view(dtype).split(size):
        assert_exact(measure(part).sketch, to_float64(part))


@SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_random_bits_are_measured_with_their_units(dtype: torch.dtype, size: int) -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, size, dtype=np.uint32)
    tensor = torch.from_numpy(random.view(np.float32)).to(dtype).view(-1, 100)
    record = measure(tensor, unit_axis=1)
    assert_exact(record.sketch, to_float64(tensor))
    assert_units(record, to_float64(tensor), 1)


def test_random_float32_bits_and_ties_are_measured_exactly() -> None:
    random = np.random.default_rng(0).integers(0, 1 << 32, 60_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    for bits in (random, ties - 1, ties, ties + 1):
        tensor = torch.from_numpy(bits.view(np.float32))
        for part in (tensor, *tensor.split(20_000)):
            assert_exact(measure(part).sketch, to_float64(part))


@given(arrays(np.float32, st.integers(1, 60), elements=st.floats(width=32)))
def test_any_float32_numbers_are_measured_exactly(x: NDArray[np.float32]) -> None:
    assert_exact(measure(torch.from_numpy(x)).sketch, x)


def test_complex_numbers_count_by_magnitude_even_beyond_float32() -> None:
    tensor = torch.tensor([3 + 4j, 0, 2.0**127 * (1 + 1j)])
    assert tensor.dtype == torch.complex64
    assert_moments(measure(tensor).sketch, np.array([5, 0, 2.0**127 * 2**0.5]))


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


# --- values --------------------------------------------------------------------------------------


@ALL_SIZES
@pytest.mark.parametrize(
    "numbers",
    [
        [float("nan")],
        [float("inf")],
        [float("-inf"), float("inf")],
        [0.0],
        [-0.0],
        [1e-45, -3e-40],
        [float("nan"), 1.0, float("inf"), -2.0],
        [1e30, -2e30],
        [3.4e38],
        [1e-25, -3e-25],
        [0.1],
        [5.0, 6.0],
        [-5.0],
    ],
    ids=str,
)
def test_uniform_and_extreme_values_are_measured_exactly(numbers: list[float], size: int) -> None:
    tensor = torch.tensor(numbers).repeat(size // len(numbers))
    sketch = measure(tensor).sketch
    assert_moments(sketch, tensor.numpy())
    np.testing.assert_array_equal(sketch.buckets, sketch_array(tensor.numpy()).buckets)
    np.testing.assert_allclose(sketch.counts.sum(), sketch.finite_count)


@ALL_SIZES
def test_float64_is_not_rounded(size: int) -> None:
    tensor = 1 + 1e-12 * normal(size).double()
    sketch = measure(tensor).sketch
    assert (sketch.min, sketch.max) == (tensor.min().item(), tensor.max().item())
    np.testing.assert_allclose(sketch.mean - 1, tensor.numpy().mean() - 1, atol=1e-15)
    for scale in (1e150, 1e-200, 1e300):
        assert_moments(measure(tensor * scale).sketch, (tensor * scale).numpy())


def test_empty_and_0_dim_tensors_are_measured() -> None:
    assert measure(torch.empty(0, 4)).sketch.count == 0
    assert measure(torch.empty(0, 4), unit_axis=1).unit_min is None
    assert_exact(measure(torch.tensor(-2.5)).sketch, np.array([-2.5]))


def test_more_elements_in_one_bucket_than_float32_can_count_are_counted() -> None:
    count = (1 << 24) + 3
    sketch = measure(torch.ones(count)).sketch
    assert (sketch.count, sketch.sum, sketch.sum_squares) == (count, count, count)
    assert sketch.counts.tolist() == [count]
    assert measure(torch.zeros(1).expand(count)).sketch.zero_count == count


# --- layouts -------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.transpose(0, 2),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "every other row": lambda t: t[::2],
    "every other column": lambda t: t[..., ::2],
    "flipped": lambda t: t.flip(1)[:, 1:],
    "expanded": lambda t: t[:, :1].expand(-1, 5, -1, -1),
    "one number expanded": lambda t: t[0, 0, 0, 0].expand(t.shape),
    "with an offset": lambda t: t[1:],
    "parameter": lambda t: nn.Parameter(t.clone()),
    "negative bit": lambda t: torch._neg_view(t),
    "negative bit, not dense": lambda t: torch.complex(t, t).conj().imag,
    "conjugate": lambda t: torch.complex(t, t).conj(),
    "zeros without memory": lambda t: torch._efficientzerotensor(t.shape),
}


@pytest.mark.slow
@ALL_SIZES
@pytest.mark.parametrize("axis", [None, 1, -1, 0])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_memory_layout_is_measured(layout: str, axis: int | None, size: int) -> None:
    tensor = LAYOUTS[layout](normal(6, 5, size // 150, 10).relu())
    record = measure(tensor, unit_axis=axis)
    values = to_float64(tensor.detach().clone())
    if values.size <= FULL_ELEMENTS:
        assert_exact(record.sketch, values)
    else:
        assert_moments(record.sketch, values)
        assert distance(record.sketch, values) < 0.01
    assert_units(record, values, axis)


def assert_units(record: TensorRecord, values: NDArray[Any], axis: int | None) -> None:
    if axis is None:
        assert (record.unit_min, record.unit_max) == (None, None)
        return
    assert record.unit_min is not None
    assert record.unit_max is not None
    assert record.unit_min.dtype == record.unit_max.dtype == np.float32
    rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    np.testing.assert_array_equal(record.unit_min, rows.min(axis=1).astype(np.float32))
    np.testing.assert_array_equal(record.unit_max, rows.max(axis=1).astype(np.float32))


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
    axis = data.draw(st.integers(0, tensor.ndim - 1))
    record, values = measure(tensor, unit_axis=axis), to_float64(tensor)
    assert_exact(record.sketch, values)
    assert_units(record, values, axis if values.size else None)


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
    record = measure(convert(tensor), unit_axis=1)
    assert_exact(record.sketch, tensor.numpy())
    assert record.unit_min is None


def test_uncoalesced_sparse_tensors_are_added_up_in_a_copy() -> None:
    tensor = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 4.0], (5,), check_invariants=True)
    assert_exact(measure(tensor).sketch, np.array([3.0, 0, 4, 0, 0]))
    assert not tensor.is_coalesced()


# --- samples of large tensors --------------------------------------------------------------------


def test_a_large_tensor_has_exact_moments_and_a_sampled_histogram() -> None:
    tensor = normal(1_000_000).relu()
    sketch = measure(tensor).sketch
    assert_moments(sketch, tensor.numpy())
    assert distance(sketch, tensor.numpy()) < 0.008
    np.testing.assert_allclose(sketch.counts.sum(), tensor.numel())
    assert sketch.counts[sketch.buckets == 0] == sketch.zero_count


@pytest.mark.parametrize("columns", [256, 768, 1000])
def test_samples_are_spread_over_all_columns(columns: int) -> None:
    scale = torch.logspace(-3, 3, columns)
    tensor = normal(1_000_000 // columns, columns) * scale
    assert distance(measure(tensor).sketch, tensor.numpy()) < 0.015


@pytest.mark.parametrize("extreme", [1e6, -1e6, float("inf"), float("nan")])
def test_one_outlier_is_never_missed(extreme: float) -> None:
    tensor = torch.zeros(500_000)
    tensor[123_457] = extreme
    sketch = measure(tensor).sketch
    assert_exact(sketch, tensor.numpy())


def test_sampled_counts_add_up_with_infinities_and_huge_numbers() -> None:
    tensor = normal(500_000)
    tensor[::3] = float("inf")
    tensor[1::3] = 3.4e38
    tensor[2::30] = float("nan")
    sketch = measure(tensor).sketch
    assert_moments(sketch, tensor.numpy())
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


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 10), -1),
        ((16,), 0),
        ((1, 1), 1),
        ((300, 7), 1),
        ((30_000, 3), -1),
        ((5_000, 48), -1),
        ((700, 300), -1),
        ((90, 3000), 1),
        ((8, 16, 7, 7), 1),
        ((33, 64, 4, 4), 1),
        ((3, 5, 100, 101), 1),
        ((2, 3, 400, 500), 1),
        ((1, 2, 600, 700), 1),
        ((2, 70_000, 3), 1),
        ((200, 300), 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_extremes_of_each_unit_are_exact(
    shape: tuple[int, ...], axis: int, dtype: torch.dtype
) -> None:
    tensor = normal(*shape).relu().to(dtype)
    record = measure(tensor, unit_axis=axis)
    assert_moments(record.sketch, to_float64(tensor))
    assert_units(record, to_float64(tensor), axis)


@pytest.mark.slow
@given(
    arrays(
        np.float32,
        st.tuples(st.integers(1, 700), st.integers(1, 9), st.integers(1, 70)),
        elements=st.floats(-9, 9, width=32),
        fill=st.floats(-9, 9, width=32),
    )
)
def test_extremes_of_units_of_any_shape_are_exact(x: NDArray[np.float32]) -> None:
    assert_units(measure(torch.from_numpy(x), unit_axis=1), x, 1)


@pytest.mark.parametrize(
    ("count", "width", "inner"),
    [
        shape
        for shape in itertools.product([3, 299], [1, 3, 48, 255], [1, 3, 80])
        if math.prod(shape) < 250_000  # the largest take seconds and add no case
    ],
)
def test_extremes_in_any_row_are_found(count: int, width: int, inner: int) -> None:
    x = torch.zeros(count, width, inner)
    for row in {*range(0, count, 17), count - 1}:
        x[row] = torch.arange(float(width))[:, None] - 10
        assert_units(measure(x, unit_axis=1), x.numpy(), 1)
        x[row] = float("nan")
        assert_units(measure(x, unit_axis=1), x.numpy(), 1)
        x[row] = 0


@SIZES
def test_dead_units_and_units_with_nan_are_distinguished(size: int) -> None:
    tensor = normal(size // 4, 4)
    tensor[:, 1] = 0
    tensor[3, 2] = float("nan")
    record = measure(tensor, unit_axis=1)
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


def test_records_are_in_the_order_of_adding() -> None:
    measurer = Measurer()
    sizes = [3, 40_000, 32_000, 0, 32_001, 200_000, 1]
    tensors = [torch.full((size,), float(i)) for i, size in enumerate(sizes)]
    tensors += [tensor.double() for tensor in tensors]
    assert [measurer.add(tensor) for tensor in tensors] == list(range(14))
    records = measurer.finish().reduce()
    assert list(records) == list(range(14))
    assert records.rows.count.tolist() == sizes * 2
    assert records.rows.sum.tolist() == [t.double().sum().item() for t in tensors]
    assert not measurer.finish().reduce()


@ALL_SIZES
def test_the_values_are_those_at_the_time_of_adding(size: int) -> None:
    tensor = torch.ones(size)
    measurer = Measurer()
    measurer.add(tensor)
    tensor.fill_(7)
    (record,) = measurer.finish().reduce().values()
    assert (record.sketch.min, record.sketch.max) == (1, 1)
    assert record.sketch.buckets.tolist() == [int(bucket_indices(np.array(1.0)))]


def test_a_tensor_that_changed_without_a_new_version_is_read_again() -> None:
    x = torch.tensor([-2.0, 1.0])
    measurer, version = Measurer(), x._version
    indices = [measurer.add(x)]
    x.data.clamp_(min=0.0)
    assert x._version == version
    indices.append(measurer.add(x))
    records = measurer.finish().reduce()
    assert indices == [0, 1]
    assert records.rows.min.tolist() == [-2, 0]


@SIZES
def test_many_tensors_at_once_equal_one_by_one(size: int) -> None:
    tensors = [torch.randn(size), torch.randn(3, 4).T, torch.empty(0), torch.arange(5)]
    tensors += [torch.eye(3).to_sparse(), torch.randn(2, 6)[:, ::2], torch.zeros(2, device="meta")]
    measurer = Measurer()
    together = measurer.add_all(tensors)
    single = [measurer.add(tensor) for tensor in tensors]
    assert together == [0, 1, 2, 3, 4, 5, None]
    assert single == [6, 7, 8, 9, 10, 11, None]
    records = measurer.finish().reduce()
    for index in range(6):
        for name, value in vars(records[index].sketch).items():
            other = getattr(records[index + 6].sketch, name)
            np.testing.assert_array_equal(value, other, err_msg=name)


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


@ALL_SIZES
def test_no_tensor_is_kept(size: int) -> None:
    tensor = normal(size)
    reference = weakref.ref(tensor.untyped_storage())
    measurer = Measurer()
    measurer.add(tensor)
    del tensor
    assert reference() is None


def test_reducing_twice_returns_the_same_records() -> None:
    measurer = Measurer()
    measurer.add(normal(5))
    measurements = measurer.finish()
    assert measurements.reduce() is measurements.reduce()


def test_steps_are_reduced_on_other_threads_while_the_next_is_measured() -> None:
    measurer = Measurer()
    results: dict[int, Tensors[int]] = {}
    threads = []
    for step in range(8):
        for _ in range(30):
            measurer.add(torch.full((3_000,), float(step + 1)))
        measurer.add(torch.full((40_000,), float(step + 1)))
        measurements = measurer.finish()
        thread = threading.Thread(
            target=lambda i, m: results.setdefault(i, m.reduce()), args=(step, measurements)
        )
        thread.start()
        threads.append(thread)
    for thread in threads:
        thread.join()
    for step, records in results.items():
        assert set(records.rows.min.tolist()) == {float(step + 1)}
        assert set(records.rows.max.tolist()) == {float(step + 1)}
        assert len(records) == 31


def test_several_threads_can_add_at_once(often_interrupted: None) -> None:
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

"""Tensors measured as on an accelerator, by PyTorch's operations on CPU tensors, against NumPy.

``test_measure.py`` has those that are sent whole, of every dtype and layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, nan

import numpy as np
import pytest
import torch
from torch import Tensor

from telemetry import TensorRecord
from telemetry.measure import Measurements
from telemetry.measure.device import STEP_BYTES
from telemetry.measure.tensors import FULL_ELEMENTS
from telemetry.records.sketch import sketch_array
from tests.helpers.launches import Launches

# PyTorch adds up float32 numbers one after the other on the CPU, and in parallel on a GPU.
SUMS = 1e-4
# Of a sample of 32,768.
FEW_ZEROS, FEW_COUNTS, KURTOSIS = 0.015, 0.02, 0.1


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("telemetry.measure.device.is_on_host", lambda tensor: False)


def measure(
    tensors: Sequence[Tensor], axis: int | None = None, powers: int = 4, *, together: bool = False
) -> list[TensorRecord]:
    measurements = Measurements()
    if together:
        numbers = measurements.add_all(tensors, unit_axis=axis, powers=powers)
    else:
        numbers = [measurements.add(t, unit_axis=axis, powers=powers) for t in tensors]
    records = measurements.finish().reduce()
    return [records[number] for number in numbers if number is not None]


def assert_right(record: TensorRecord, tensor: Tensor, axis: int | None = None) -> None:
    """Compare exact figures exactly, and those of the sample within its error."""
    values = (tensor.abs() if tensor.is_complex() else tensor).to(torch.float64).numpy()
    found, true = record.sketch, sketch_array(values)
    assert tensor.numel() > FULL_ELEMENTS
    assert record.estimated
    assert found.count == true.count
    assert (found.nan_count > 0) is (true.nan_count > 0)
    assert (found.nonfinite_count > 0) is (true.nonfinite_count > 0)
    is_finite = not true.nonfinite_count
    if is_finite:
        assert (found.min, found.max) == (true.min, true.max)
    rtol = SUMS if is_finite else 0.05
    assert found.norm == pytest.approx(true.norm, rel=rtol)
    assert found.mean == pytest.approx(true.mean, abs=rtol * true.rms)
    assert found.zero_fraction == pytest.approx(true.zero_fraction, abs=FEW_ZEROS)
    assert found.kurtosis == pytest.approx(true.kurtosis, rel=KURTOSIS, nan_ok=True)
    assert_consistent(record)
    buckets = np.union1d(found.buckets, true.buckets)
    shares = np.zeros((2, len(buckets)))
    for share, sketch in zip(shares, (found, true), strict=True):
        share[np.searchsorted(buckets, sketch.buckets)] = sketch.counts / sketch.counts.sum()
    assert np.abs(np.diff(shares.cumsum(axis=1), axis=0)).max() < FEW_COUNTS
    if axis is None:
        assert record.unit_min is None
        return
    others = tuple(other for other in range(values.ndim) if other != axis)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(record.unit_min, values.min(others).astype(np.float32))
        np.testing.assert_array_equal(record.unit_max, values.max(others).astype(np.float32))


def assert_consistent(record: TensorRecord) -> None:
    sketch = record.sketch
    assert (np.diff(sketch.buckets) > 0).all()
    assert (sketch.counts > 0).all()
    assert sketch.counts.sum() == pytest.approx(sketch.finite_count)
    assert sketch.count >= sketch.nonfinite_count >= 0
    assert sketch.finite_count >= sketch.zero_count >= 0
    assert not sketch.sum_squares < 0


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


# --- figures -------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "half zeros": torch.relu,
    "far from zero": lambda x: x + 3,
    "tiny": lambda x: x * 1e-25,
    "uniform": torch.erf,
    "positive": lambda x: x.abs() + 0.1,
}
LAYOUTS: dict[str, tuple[tuple[int, ...], int | None, Callable[[Tensor], Tensor]]] = {
    "no units": ((250_007,), None, lambda x: x),
    "units last": ((700, 300), 1, lambda x: x),
    "units first": ((300, 700), 0, lambda x: x),
    "units in the middle": ((6, 40, 33, 33), 1, lambda x: x),
    "channels_last": ((4, 32, 40, 41), 1, lambda x: x.to(memory_format=torch.channels_last)),
    "every second column": ((64, 200, 50), 1, lambda x: x[:, ::2]),
    "transposed": ((64, 96, 50), 2, lambda x: x.transpose(0, 2)),
    "a slice of one axis": ((200_000,), 0, lambda x: x[::2]),
    "negative bit": ((700, 300), 1, torch._neg_view),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_figures_of_large_tensors_are_those_of_numpy(layout: str, dtype: str) -> None:
    shape, axis, view = LAYOUTS[layout]
    for change in VALUES.values():
        values = change(normal(*shape)).to(getattr(torch, dtype))
        tensors = [view(values)]
        with_special = values.clone()
        with_special.view(-1)[[4, 76]] = torch.tensor([nan, inf], dtype=values.dtype)
        tensors.append(view(with_special))
        for record, tensor in zip(measure(tensors, axis), tensors, strict=True):
            assert_right(record, tensor.resolve_neg(), axis)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn", "int32", "uint8", "bool"])
def test_large_tensors_of_rare_dtypes_are_measured(dtype: str) -> None:
    tensor = (normal(500, 200).abs() * 3).to(getattr(torch, dtype))
    [record] = measure([tensor], 1)
    assert_right(record, tensor, 1)


def test_tensors_of_any_size_and_dtype_are_measured_together() -> None:
    sizes = (3, 70_000, 768, 300_000, FULL_ELEMENTS, FULL_ELEMENTS + 1)
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    tensors = [normal(size).to(dtype) for size in sizes for dtype in dtypes]
    records = measure(tensors, powers=2, together=True)
    for record, tensor in zip(records, tensors, strict=True):
        assert record.estimated is (tensor.numel() > FULL_ELEMENTS)
        assert record.sketch.max == tensor.max()
        assert record.sketch.norm == pytest.approx(tensor.double().norm().item(), rel=SUMS)
        assert np.isnan(record.sketch.kurtosis)


def test_a_value_that_the_sample_lacks_is_seen() -> None:
    zeros = torch.zeros(400, 300)
    one = zeros.index_put((torch.tensor(7), torch.tensor(9)), torch.tensor(-4.0))
    spike = normal(1000, 300)
    spike[500, 123] = 3000.0
    all_nan = torch.full((400, 300), nan)
    huge = normal(400, 300) * 1e25  # their squares overflow float32
    none, small, massive, lost, large = measure([zeros, one, spike, all_nan, huge], 1)
    assert none.dead_fraction == 1
    assert (none.sketch.zero_count, none.sketch.norm) == (120_000, 0)
    assert (small.sketch.min, small.sketch.zero_count) == (-4, 119_999)
    assert small.zero_units.sum() == 299
    expected = sketch_array(spike.double().numpy()).kurtosis
    assert massive.sketch.kurtosis == pytest.approx(expected, rel=0.02)
    assert lost.sketch.nan_count == 120_000
    assert np.isnan(lost.sketch.min)
    assert large.sketch.nonfinite_count == 0
    assert large.sketch.norm == pytest.approx(huge.double().norm().item(), rel=0.02)


def test_magnitudes_that_bfloat16_lacks_are_zeros_unless_no_element_is_zero() -> None:
    """Softmax of a mask of -100 gives 4e-44."""
    without = normal(400, 300).abs() + 1
    without[:, ::2] = 4e-44
    with_one = without.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(0.0))
    none, some = measure([without, with_one])
    assert none.sketch.zero_count == 0
    assert none.sketch.min == pytest.approx(4e-44, rel=0.1)
    assert some.sketch.min == 0
    assert some.sketch.zero_fraction == pytest.approx(0.5, abs=FEW_ZEROS)


@pytest.mark.parametrize(
    ("shape", "function"),
    [((400, 300), "telemetry.measure.device.norms_of"), ((40, 20), "torch.Tensor.clone")],
)
def test_a_tensor_for_which_memory_is_missing_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], function: str
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise torch.cuda.OutOfMemoryError

    measurements = Measurements()
    measurements.add(normal(400, 200) * 9)
    with monkeypatch.context() as patch:
        patch.setattr(function, no_memory)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            measurements.add(normal(*shape))
    measurements.add(normal(40, 20))
    large, small = measurements.finish().reduce().values()
    assert_right(large, normal(400, 200) * 9)
    assert small.sketch.count == 800


def test_rare_values_leave_figures_consistent() -> None:
    random = torch.Generator().manual_seed(1)
    special = torch.tensor([0.0, -0.0, nan, inf, -inf, 1.0, -3e38, 3.4e38, 1e-45, -1e-30])

    def drawn() -> Tensor:
        return special[int(torch.randint(len(special), (), generator=random))]

    for trial in range(60):
        shape, axis = [((300, 230), 1), ((70_001,), None), ((4, 40, 500), 1)][trial % 3]
        x = torch.full(shape, float(drawn()))
        for _ in range(trial % 5):
            places = torch.randint(x.numel(), (1 + 30 * (trial % 7),), generator=random)
            x.view(-1)[places] = drawn()
        [record] = measure([x], axis)
        assert_consistent(record)
        finite = np.isfinite(x.numpy())
        assert (record.sketch.nonfinite_count == 0) is bool(finite.all())
        if finite.all():
            assert (record.sketch.min, record.sketch.max) == (x.min(), x.max())


# --- operations ----------------------------------------------------------------------------------


def test_an_operation_that_reads_or_writes_would_be_noticed() -> None:
    reads = (torch.Tensor.item, bool, torch.nonzero, torch.unique, lambda x: x[x > 0])
    for work in (*reads, torch.Tensor.zero_, torch.rand_like):
        with pytest.raises(AssertionError), Launches():
            work(torch.ones(1))


@pytest.mark.parametrize(
    ("shape", "axis", "most"),
    [((700, 300), 1, 4), ((70_001,), None, 4), ((6, 40, 33, 33), 1, 6), ((200, 300), 1, 1)],
    ids=["units last", "no units", "units in the middle", "small"],
)
def test_a_tensor_takes_few_launches(shape: tuple[int, ...], axis: int | None, most: int) -> None:
    measurements, tensor = Measurements(), normal(*shape)
    with Launches() as found:
        measurements.add(tensor, unit_axis=axis)
    assert found.total <= most, found.by_name


def test_a_full_step_of_gpt2_takes_at_most_1600_launches() -> None:
    """Its 150 outputs, their gradients, 148 parameters, gradients and second moments."""
    width, layers = 768, 12
    matrices = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    vectors = [(3 * width,), (width,), (4 * width,), (width,)] + [(width,)] * 4
    parameters = [torch.empty(s) for s in [(50_257, width), (1024, width), (width,), (width,)]]
    parameters += [torch.empty(s) for s in (matrices + vectors) * layers]
    assert len(parameters) == 148
    assert 124e6 < sum(p.numel() for p in parameters) < 125e6
    # Larger ones take no more launches.
    outputs = [torch.zeros(100, width)] * 149 + [torch.zeros(2, 50_257)]
    measurements = Measurements()
    with Launches() as found:
        for output in outputs * 2:
            measurements.add(output, unit_axis=1)
        for _ in range(3):
            measurements.add_all(parameters, powers=2)
        measurements.finish()
    assert 1000 < found.total <= 1600, found.by_name


def test_a_step_with_very_many_tensors_sends_little_of_each() -> None:
    """Even of the most observations that a step has."""
    measurements, tensor = Measurements(), torch.ones(FULL_ELEMENTS)
    for _ in range(8192):
        measurements.add(tensor)
    measurements.finish()
    assert STEP_BYTES / 2 < measurements.nbytes <= STEP_BYTES
    assert {*measurements.reduce().rows.sum.tolist()} == {FULL_ELEMENTS}

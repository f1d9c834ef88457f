"""From a tensor on a GPU to its row, with a driver that is a stub: see stub_driver.c."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import numpy as np
import pytest
import stubbed
import torch
from require import needs_tensor_reader
from stubbed import Driver, on_gpu
from torch import Tensor

from telemetry.measure import Measurer, cuda, native
from telemetry.records import TensorRecord

pytestmark = [
    needs_tensor_reader,
    pytest.mark.skipif(not shutil.which("c++"), reason="no compiler for the stub"),
]

LAUNCHES = ("cuLaunchKernel",)


@pytest.fixture
def driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    driver = stubbed.install(monkeypatch, tmp_path_factory.getbasetemp())
    assert cuda.gpu(0) is not None
    driver.forget()
    yield driver
    driver.fail("")
    driver.deferred = driver.capturing = 0


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def on_host(tensor: Tensor, unit_axis: int | None = None, powers: int = 4) -> TensorRecord:
    # By NumPy's types the extension would be asked for the tensors of the GPU.
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(native, "TENSORS", None)
        measurer = Measurer()
        measurer.add(tensor.float(), unit_axis=unit_axis, powers=powers)
        [record] = measurer.finish().reduce().values()
    return record


def assert_same(actual: TensorRecord, expected: TensorRecord) -> None:
    a, b = actual.sketch, expected.sketch
    counts = ("count", "zero_count", "nan_count", "positive_inf_count", "negative_inf_count")
    assert [getattr(a, name) for name in counts] == [getattr(b, name) for name in counts]
    extremes = [a.min, a.max], [b.min, b.max]
    np.testing.assert_array_equal(*extremes)
    np.testing.assert_allclose(a.sum_squares, b.sum_squares, rtol=1e-6)
    np.testing.assert_allclose(
        a.sum, b.sum, rtol=1e-6, atol=1e-6 * a.count * np.sqrt(b.sum_squares)
    )
    np.testing.assert_array_equal(a.buckets, b.buckets)
    np.testing.assert_array_equal(a.counts, b.counts)
    np.testing.assert_array_equal(actual.unit_min, expected.unit_min)
    np.testing.assert_array_equal(actual.unit_max, expected.unit_max)


def measured(*tensors: Tensor, **options: int | None) -> list[TensorRecord]:
    measurer = Measurer()
    for tensor in tensors:
        assert measurer.add(on_gpu(tensor), **options) is not None
    return [*measurer.finish().reduce().values()]


# --- what is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_layouts_offsets_and_units(driver: Driver, dtype: torch.dtype, axis: int | None) -> None:
    whole = normal(4, 6, 5, 3).relu().to(dtype)
    whole[0, 2] = float("nan")
    views = [
        whole,
        whole.to(memory_format=torch.channels_last),
        whole.transpose(1, 3),
        whole[1:3],  # begins at an odd multiple of 2 or 4 bytes
        normal(31).to(dtype)[3:].view(7, 4),
    ]
    records = measured(*views, unit_axis=axis)
    assert sum("measure" in kernel for kernel in driver.counts().elements()) == len(views)
    for record, view in zip(records, views, strict=True):
        assert_same(record, on_host(view, axis))

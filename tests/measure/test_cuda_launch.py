"""From a tensor on a GPU to its record, with a driver that is a stub: see stub_driver.c."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stubbed
import torch
from stubbed import Driver, on_gpu
from torch import Tensor

from telemetry.measure import Measurer
from telemetry.records.sketch import sketch_array


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return stubbed.install(monkeypatch, tmp_path_factory.getbasetemp())


def test_tensors_are_measured(driver: Driver) -> None:
    tensors = [torch.randn(100, 7), torch.randn(3, 5).bfloat16(), torch.randn(9).half()]
    measurer = Measurer()
    for tensor in tensors:
        assert measurer.add(on_gpu(tensor)) is not None
    records = measurer.finish().reduce().values()
    print(driver.counts())
    for record, tensor in zip(records, tensors, strict=True):
        expected = sketch_array(tensor.float().numpy())
        assert record.sketch.count == expected.count
        assert np.array_equal(record.sketch.buckets, expected.buckets)
        assert np.array_equal(record.sketch.counts, expected.counts)
        assert record.sketch.sum == pytest.approx(expected.sum)

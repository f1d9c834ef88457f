"""The kernels are used on a kind of GPU only after they were found to be right there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import stubbed
import torch
from require import needs_tensor_reader
from stubbed import Driver, on_gpu

from telemetry.measure import cuda, cuda_check, nvrtc
from telemetry.records.rows import Rows

pytestmark = [
    needs_tensor_reader,
    pytest.mark.skipif(not shutil.which("c++"), reason="no compiler for the stub"),
]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    layouts = (((1,), None), ((513,), None), ((6, 40), 1), ((2, 3, 5), 1))
    monkeypatch.setattr(cuda_check, "_LAYOUTS", layouts)
    # Only a real GPU has a histogram of integers.
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    return stubbed.install(monkeypatch, tmp_path_factory.getbasetemp())


def test_kernels_that_are_right_pass(driver: Driver) -> None:
    cuda_check.compare(cuda.Gpu(0, checked=True), on_gpu)


@pytest.mark.parametrize("column", ["min", "sum", "counts", "units", "nan_count"])
def test_kernels_that_are_wrong_fail(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    decode = cuda.GpuRows.decode

    def wrong(self: cuda.GpuRows) -> Rows:
        rows = decode(self)
        return rows.having(**{column: getattr(rows, column) + 1})

    monkeypatch.setattr(cuda.GpuRows, "decode", wrong)
    with pytest.raises(ValueError, match=column):
        cuda_check.compare(cuda.Gpu(0, checked=True), on_gpu)


def test_a_kind_of_gpu_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(subprocess, "run", run)
    cuda._check(0, b"kernels")
    cuda._check(0, b"kernels")
    assert len(ran) == 1
    cuda._check(0, b"other kernels")
    assert len(ran) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_what_cannot_be_checked_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    with pytest.raises(OSError, match="compared with these, the kernels failed: "):
        cuda._check(0, b"kernels")
    assert not [*tmp_path.iterdir()]

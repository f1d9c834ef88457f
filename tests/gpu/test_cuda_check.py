"""The kernels are used on a GPU model only after a self-check on it passed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from telemetry.measure import cuda, cuda_check, nvrtc
from telemetry.records.rows import Rows
from tests.helpers import simulated_gpu as gpu
from tests.helpers.stubbed import Driver, needs_stub

pytestmark = needs_stub


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return gpu.install_with_kernels(monkeypatch, tmp_path_factory.getbasetemp())


@pytest.mark.parametrize("dtype", cuda.DTYPES, ids=str)
def test_the_self_check_passes_with_its_own_layouts(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    checked = cuda.Gpu(0, checked=True)
    monkeypatch.setattr(cuda, "DTYPES", (dtype,))  # all of them take half a minute
    cuda_check.compare(checked, gpu.on_gpu)


@pytest.mark.parametrize("column", ["min", "sum", "counts", "units", "nan_count"])
def test_wrong_kernels_fail_the_self_check(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    layouts = (((1,), None), ((513,), None), ((6, 40), 1), ((2, 3, 5), 1))
    monkeypatch.setattr(cuda_check, "_LAYOUTS", layouts)
    decode = cuda.GpuRows.decode

    def wrong(self: cuda.GpuRows) -> Rows:
        rows = decode(self)
        return rows.having(**{column: getattr(rows, column) + 1})

    monkeypatch.setattr(cuda.GpuRows, "decode", wrong)
    with pytest.raises(ValueError, match=column):
        cuda_check.compare(cuda.Gpu(0, checked=True), gpu.on_gpu)


def test_a_gpu_model_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def run(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(subprocess, "run", run)
    nvrtc.check(0, b"kernels")
    nvrtc.check(0, b"kernels")
    assert len(ran) == 1
    nvrtc.check(0, b"other kernels")
    assert len(ran) == 2


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        (1, "compared with these, the kernels failed: .*why"),
        (-11, "compared with these, the kernels failed: .*why"),  # a fault
        (nvrtc.NOT_CHECKED, "could not be compared with these before their first use: why"),
    ],
)
def test_kernels_that_did_not_pass_are_not_used_and_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, reason: str
) -> None:
    def run(command: Any, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, status, "", "why\n")

    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(subprocess, "run", run)
    for _ in range(2):
        with pytest.raises(OSError, match=reason):
            nvrtc.check(0, b"kernels")
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_an_impossible_check_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    with pytest.raises(OSError, match="could not be compared with these before their first use: "):
        nvrtc.check(0, b"kernels")


def test_a_check_without_memory_exits_as_not_checked(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacks(gpu: cuda.Gpu, put: object) -> None:
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr(cuda_check, "compare", lacks)
    monkeypatch.setattr(Tensor, "to", lambda tensor, target: tensor)
    with pytest.raises(SystemExit) as ended:
        cuda_check.main(0)
    assert ended.value.code == nvrtc.NOT_CHECKED


def test_a_manual_check_is_recorded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(nvrtc, "user_cache", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(cuda_check, "compare", lambda gpu, put: None)
    monkeypatch.setattr(Tensor, "to", lambda tensor, target: tensor)
    cuda_check.main(0)
    assert [file.suffix for file in tmp_path.iterdir()] == [".passed"]

"""The fused kernel, run by Triton's interpreter on the CPU; and when it is used."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from telemetry.measure import Measurer, device

ROOT = Path(__file__).parents[1]


def test_the_kernel_agrees_with_pytorch_and_numpy() -> None:
    pytest.importorskip("telemetry.measure.triton_kernel", exc_type=ImportError)
    # The interpreter is chosen when Triton is imported, so for a process.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "tests/triton_cases.py"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_the_kernel_compiles_for_gpus(dtype: str) -> None:
    """Which needs none; the interpreter takes more than the compiler does."""
    kernel = pytest.importorskip("telemetry.measure.triton_kernel", exc_type=ImportError)
    import triton
    from triton.backends.compiler import GPUTarget

    constants = {"tile": kernel._TILE, "threads": kernel._THREADS, "vector": 4, "codes": 4096}
    source = triton.compiler.ASTSource(
        kernel._reduce,
        signature={"values": f"*{dtype}", "row": "*fp64", "count": "i64"}
        | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
    )
    options = {"num_warps": kernel._WARPS, **kernel._OPTIONS}
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    # Counting is by atomics in shared memory, of which every multiprocessor has 48 KiB.
    assert "shared.add.u32" in compiled.asm["ptx"]
    assert compiled.metadata.shared <= 48 * 1024


class OnGpu(Tensor):
    """Says that it is on a GPU."""

    is_cpu = False
    is_cuda = True


def measure(kernel: object, monkeypatch: pytest.MonkeyPatch, tensor: Tensor) -> float:
    """Sum of squares of a tensor's values, by a kernel or without."""
    monkeypatch.setattr(device, "_kernels", [kernel])
    twos = torch.full((device.CODES_AT + 4096,), 2.0).double()
    monkeypatch.setattr(device, "_statistics", lambda tensor: twos)
    measurer = Measurer()
    measurer.add(tensor.as_subclass(OnGpu))
    (record,) = measurer.finish().reduce()
    return record.sketch.sum_squares


def add_ones(tensor: Tensor, row: Tensor) -> None:
    row += 1


def test_the_kernel_is_used_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(DTYPES={torch.float32}, add_statistics=add_ones)
    assert measure(ours, monkeypatch, torch.ones(5)) == 1
    assert measure(ours, monkeypatch, torch.ones(5, dtype=torch.int64)) == 2
    assert measure(ours, monkeypatch, torch.ones(6, 6)[::2, ::2]) == 2
    assert measure(None, monkeypatch, torch.ones(5)) == 2


def test_each_tensor_has_a_row_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = SimpleNamespace(DTYPES={torch.float32}, add_statistics=add_ones)
    monkeypatch.setattr(device, "_kernels", [ours])
    measurer = Measurer()
    count = 2 * device._ROWS_AT_ONCE + 1
    for _ in range(count):
        measurer.add(torch.ones(5).as_subclass(OnGpu))
    measurements = measurer.finish()
    assert {record.sketch.sum for record in measurements.reduce()} == {1}
    assert measurements.copied_bytes == count * 8 * (device.CODES_AT + 4096)


def test_a_kernel_that_cannot_be_compiled_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = 0

    def fail(tensor: Tensor, row: Tensor) -> None:
        nonlocal calls
        calls += 1
        raise RuntimeError("Failed to find C compiler")

    broken = SimpleNamespace(DTYPES={torch.float32}, add_statistics=fail)
    with caplog.at_level(logging.WARNING, "telemetry"):
        assert measure(broken, monkeypatch, torch.ones(5)) == 2
    assert "the GPU kernel failed" in caplog.text
    assert device._load_kernel() is None
    assert calls == 1


def test_without_triton_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_kernels", [])
    monkeypatch.setitem(sys.modules, "telemetry.measure.triton_kernel", None)
    assert device._load_kernel() is None


def test_on_the_cpu_triton_is_not_loaded() -> None:
    program = """
        import sys, torch, telemetry.measure
        measurer = telemetry.measure.Measurer()
        measurer.add(torch.ones(100_000))
        measurer.finish().reduce()
        assert "triton" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, check=True)

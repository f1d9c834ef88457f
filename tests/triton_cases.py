"""Tests of the Triton kernel that need its interpreter; run by ``test_triton_kernel.py``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from moments_close import assert_moments_close
from torch import Tensor

from telemetry.measure import device, triton_kernel
from telemetry.measure.sampling import CODES
from telemetry.sketch import sketch_array

TILE = triton_kernel._TILE


def normal(count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(0))


def random_bits(count: int) -> Tensor:
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def by_kernel(tensor: Tensor) -> Tensor:
    row, *_ = device._blank_rows(tensor.device)
    triton_kernel.add_statistics(tensor, row)
    return row


def check(tensor: Tensor, where: str = "cpu") -> None:
    """The kernel says what PyTorch's operations say on a device, and NumPy."""
    row, expected = by_kernel(tensor.to(where)).cpu(), device._statistics(tensor.to(where)).cpu()
    assert row.dtype == expected.dtype == torch.float64
    moments = device.moments_of(row, tensor.numel())
    sketch = sketch_array(tensor.float().numpy())
    assert_moments_close(moments, device.moments_of(expected, tensor.numel()), rtol=1e-12)
    assert_moments_close(moments, sketch, rtol=1e-12)
    codes = expected[device.CODES_AT :]
    codes[torch.arange(CODES) % (CODES // 2) > 2040] = 0  # those of NaN, which are dropped later
    negative_zeros = ((tensor == 0) & tensor.signbit()).sum()
    codes[0] += negative_zeros
    codes[CODES // 2] -= negative_zeros
    assert torch.equal(row[device.CODES_AT :], codes)
    assert codes.sum() == sketch.count - sketch.nan_count


@pytest.mark.parametrize("dtype", sorted(triton_kernel.DTYPES, key=str), ids=str)
@pytest.mark.parametrize("count", [1, 17, TILE - 1, TILE, TILE + 1, 2 * TILE, 9 * TILE + 5])
def test_dtypes_and_sizes(dtype: torch.dtype, count: int) -> None:
    check(normal(count).mul(3).relu().sub(0.25).to(dtype))


@pytest.mark.parametrize("dtype", sorted(triton_kernel.DTYPES, key=str), ids=str)
def test_any_bits(dtype: torch.dtype) -> None:
    tensor = random_bits(50_000).view(dtype)
    if dtype is torch.bfloat16:  # Triton's interpreter takes its denormal numbers for zeros
        tensor = tensor.where((tensor.view(torch.int16) & 0x7F80) != 0, 1)
    check(tensor)


@pytest.mark.parametrize(
    "numbers",
    [
        [float("nan")],
        [-float("nan"), 1.0],
        [float("inf")],
        [-float("inf"), 3.4028235e38],
        [0.0, -0.0],
        [-0.0],
        [3.4028235e38, -3.4028235e38],
        [1e-45, -1e-45, 1.1754942e-38],
    ],
    ids=str,
)
def test_extreme_values(numbers: list[float]) -> None:
    check(torch.tensor(numbers).repeat(TILE))


@pytest.mark.parametrize("first", [-1.0, 1.0, 0.0, -0.0])
def test_zeros_of_one_program_and_numbers_of_another(first: float) -> None:
    tensor = torch.full((2 * TILE,), -0.0)
    tensor[:TILE] = first
    check(tensor)


def test_the_bits_next_to_infinity_are_nan() -> None:
    bits = [0x7F800000, 0x7F800001, 0x7F7FFFFF, 0x7FFFFFFF, -0x800000, -0x7FFFFF, -0x800001, -1]
    check(torch.tensor(bits, dtype=torch.int32).view(torch.float32))


def test_ties_are_rounded_as_pytorch_rounds_them() -> None:
    tops = torch.arange(0x0000, 0x7F80, dtype=torch.int32) << 16
    check(torch.cat([tops + 0x7FFF, tops + 0x8000, tops + 0x8001]).view(torch.float32))


@pytest.mark.parametrize("start", [1, 4])
def test_memory_beyond_the_tensor_is_not_read(start: int) -> None:
    memory = torch.full((TILE + 100,), float("nan"))
    for count in (80, TILE + 80):
        memory[start : start + count] = 1.0
        row = by_kernel(memory[start : start + count])
        assert row[0] == 0
        assert row[4] == row[device.CODES_AT :].sum() == count


def test_a_row_adds_up_what_it_is_given() -> None:
    parts = normal(30_000).split(9_000)
    row, *_ = device._blank_rows(torch.device("cpu"))
    for part in parts:
        triton_kernel.add_statistics(part, row)
    torch.testing.assert_close(row, by_kernel(torch.cat(parts)), rtol=1e-12, atol=0)


@settings(max_examples=10)
@given(hnp.arrays(np.float32, st.integers(1, 50), elements=st.floats(width=32)))
def test_any_numbers(numbers: np.ndarray) -> None:
    check(torch.from_numpy(numbers))

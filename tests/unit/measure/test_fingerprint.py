from __future__ import annotations

import pytest
import torch
from torch import Tensor

from telemetry.measure import fingerprint


def of(tensor: Tensor) -> float:
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
    assert of(tensor) == of(tensor.clone())
    assert of(tensor) != of(tensor.flip(0))
    assert of(tensor) != of(torch.roll(tensor, 1, 0))


def test_a_copy_at_another_address_has_the_same_fingerprint() -> None:
    values = torch.randn(1001)
    for offset in range(8):
        moved = torch.empty(1001 + offset)[offset:].copy_(values)
        assert of(moved) == of(values)


def test_tensors_without_dense_values_have_no_fingerprint() -> None:
    assert list(fingerprint(torch.randn(3, 3).to_sparse())) == []
    assert list(fingerprint(torch.empty(3, device="meta"))) == []


def test_an_empty_tensor_has_a_fingerprint() -> None:
    assert of(torch.empty(0, 3)) == 0

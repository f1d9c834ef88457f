"""Norms of many tensors at once are those of each."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from telemetry.capture.parameters import Updates, take_norms
from tests.helpers.launches import Launches

DTYPES = [torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = st.lists(st.sampled_from([0, 1, 3, 64, 1000, 1024, 1025, 5000]), max_size=12)


LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor[::2],
    lambda tensor: tensor.expand(2, -1),
    lambda tensor: torch.stack([tensor, tensor + 1], 1).t(),
]


@given(sizes=SIZES, seed=st.integers(0, 2**31))
@example(sizes=[1000] * 200, seed=0)  # joined in parts
def test_each_tensor_has_its_own_norm(sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        LAYOUTS[index % 4](
            torch.randn(size, generator=generator, dtype=torch.float64).to(DTYPES[index % 5])
        )
        for index, size in enumerate(sizes)
    ]
    norms = {
        index: float(norm)
        for group in take_norms(enumerate(tensors))
        for index, norm in zip(group.indices, group.read(), strict=True)
    }
    expected = {i: float(np.linalg.norm(t.double().numpy())) for i, t in enumerate(tensors)}
    assert norms == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("size", [100, 5000])
@pytest.mark.parametrize(
    ("bits", "is_finite"), [(0x7F800001, False), (0x7F800000, False), (0x7F7FFFFF, True)]
)
def test_infinite_and_nan_are_distinguished_from_huge(
    size: int, bits: int, is_finite: bool
) -> None:
    tensor = torch.ones(size)
    tensor.view(torch.int32)[7] = bits
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        [norms] = take_norms([(0, tensor)])
        [norm] = norms.read()
    assert math.isfinite(norm) is is_finite
    assert norms.nonfinite() is not is_finite


@pytest.fixture(params=["CPU", "accelerator"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Reported device of parameters."""
    monkeypatch.setattr(Tensor, "is_cpu", request.param == "CPU")
    return str(request.param)


@pytest.mark.usefixtures("device")
def test_an_update_is_compared_with_its_own_parameter() -> None:
    parameters = [torch.ones(2000), torch.ones(10), torch.ones(10, dtype=torch.float64)]
    parameters += [torch.ones(300_000), torch.ones(9, 5)[:, ::2], torch.ones(10).to(torch.bfloat16)]
    parameters += [torch.ones(8, 3, 5, 5).to(memory_format=torch.channels_last), torch.ones(0)]
    updates = Updates(list(enumerate(parameters)))
    for index, parameter in enumerate(parameters):
        parameter *= 1 + 0.1 * (index + 1)
    updates.compare()
    ratios = {index: ratio for index, _, _, ratio in updates.read()}
    exact = {index: 0.1 * (index + 1) for index in (0, 1, 2, 3, 4, 6)}
    assert {i: r for i, r in ratios.items() if i != 5} == pytest.approx(exact, rel=1e-4)
    assert ratios[5] == pytest.approx(0.6, rel=2**-7)  # of bfloat16


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device", ["accelerator"], indirect=True)
def test_updates_of_many_parameters_take_few_operations() -> None:
    parameters = [torch.ones(40_000 * (1 + n % 2) if n % 3 else 10) for n in range(60)]
    with Launches() as launches:
        updates = Updates(list(enumerate(parameters)))
        updates.compare()
    # Copies of small ones and samples before and after, and their differences; four of norms each.
    assert launches.total <= 6 + 2 * 4


def test_the_update_of_a_parameter_that_becomes_another_size_is_unknown() -> None:
    parameters = [torch.ones(10), torch.ones(10)]
    updates = Updates(list(enumerate(parameters)))
    parameters[0].data = torch.ones(11)
    parameters[1].zero_()
    updates.compare()
    [(index, moved, size, ratio)] = updates.read()
    assert (index, ratio) == (1, 1.0)
    assert moved == size == pytest.approx(10**0.5)


def test_zeros_that_change_have_no_finite_update() -> None:
    parameters = [torch.zeros(3), torch.zeros(3)]
    updates = Updates(list(enumerate(parameters)))
    parameters[0] += 1
    updates.compare()
    found = {index: ratio for index, _, _, ratio in updates.read()}
    assert found[0] == float("inf")
    assert found[1] != found[1]

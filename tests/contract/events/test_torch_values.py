"""Values that are serialized without torch's functions equal torch's byte for byte."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch.utils.tensorboard import summary

from telemetry.events.summary_writer import _histogram, _scalar


def default_edges() -> tuple[float, ...]:
    """Bin edges that torch's writer computes when it is built."""
    edges, edge = [], 1e-12
    while edge < 1e20:
        edges.append(edge)
        edge *= 1.1
    return (*(-edge for edge in reversed(edges)), 0.0, *edges)


EDGES = default_edges()
BINS = np.array(EDGES)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def torchs_histogram(values: Any) -> bytes:
    return bytes(summary.histogram("grad", values, list(EDGES)).SerializeToString())


# Values in bins, on their edges and next to them.
VALUES = (
    st.floats(EDGES[1], EDGES[-2])
    | st.floats(-2, 2, width=32)
    | st.sampled_from(EDGES[1:-1]).map(lambda x: float(np.nextafter(x, np.inf)))
    | st.sampled_from(EDGES[1:-1]).map(lambda x: float(np.nextafter(x, -np.inf)))
    | st.sampled_from(EDGES[:-1])
    | st.sampled_from([0.0, -0.0, 5e-324, -5e-324])
)


@pytest.mark.slow
@given(arrays(np.float64, st.integers(1, 60), elements=VALUES))
def test_a_histogram_equals_that_of_torch(values: np.ndarray) -> None:
    assert _histogram("grad", values, BINS) == torchs_histogram(values)


@pytest.mark.parametrize(
    "values",
    [
        normal(5, 7),
        normal(5, 7).t(),
        normal(200_001),
        normal(40, 50).double()[::2, ::3],
        normal(30).bfloat16(),
        normal(30).half(),
        torch.arange(-5, 9),
        torch.tensor([3], dtype=torch.uint8),
        torch.nn.Parameter(normal(3)),
        np.arange(12.0).reshape(3, 4).T,
        np.float32(0.5),
        7,
        torch.zeros(100),
        normal(10_000).relu(),
    ],
)
def test_a_histogram_of_any_values_equals_that_of_torch(values: Any) -> None:
    assert _histogram("grad", values, BINS) == torchs_histogram(values)


@pytest.mark.parametrize(
    "values",
    [
        torch.empty(0),
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0, -torch.inf]),
        torch.tensor([1.0, 1e20]),
        torch.tensor([-3e20, 1.0]),
        torch.tensor([True]),
        torch.tensor([1j]),
    ],
)
def test_unusual_values_are_passed_to_torch(values: torch.Tensor) -> None:
    assert _histogram("grad", values, BINS) is None


@given(
    st.floats() | st.integers(-(2**70), 2**70) | st.booleans(),
    st.sampled_from(
        [
            lambda x: x,
            np.float16,
            np.float32,
            np.float64,
            lambda x: np.array([float(x)]),
            lambda x: torch.tensor(float(x)),
            lambda x: torch.tensor([[float(x)]], dtype=torch.bfloat16),
        ]
    ),
)
@pytest.mark.filterwarnings("ignore:overflow")
def test_a_scalar_equals_that_of_torch(value: float, kind: Any) -> None:
    given_value = kind(value)
    expected = summary.scalar("loss", given_value).SerializeToString()
    assert _scalar("loss", given_value) == expected

"""Axis of a module's output that counts as units: channels, or the last one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from telemetry.testing import capture_run


@pytest.mark.parametrize(
    ("first", "shape"),
    [
        (nn.Conv1d(2, 5, 1), (3, 2, 7)),
        (nn.Conv2d(2, 5, 1), (3, 2, 7, 7)),
        (nn.Linear(7, 5), (3, 2, 7)),
    ],
)
def test_an_activation_has_the_units_of_the_layer_before_it(
    first: nn.Module, shape: tuple[int, ...]
) -> None:
    model = nn.Sequential(first, nn.ReLU(), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with capture_run(model) as run:
        model(torch.rand(shape)).sum().backward()
        optimizer.step()
    assert run.records[0].activations.rows.unit_count.tolist() == [5, 5, 5]

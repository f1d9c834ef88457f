"""Passes in evaluation mode count as training if the optimizer steps in this mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from telemetry.testing import capture_run


@pytest.mark.parametrize(
    ("eval_from", "outputs"), [(3, [3, 3, 3, 0, 3, 3]), (0, [3] * 6), (6, [3] * 6)]
)
def test_a_model_left_in_evaluation_mode_is_measured_from_its_second_step_on(
    eval_from: int, outputs: list[int]
) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.train(eval_from > 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with capture_run(model, rules=[]) as run:
        for step in range(6):
            model.train(step < eval_from)
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert [record.eval_mode for record in run.records] == [step >= eval_from for step in range(6)]
    assert [len(record.outputs) for record in run.records] == outputs
    assert [len(record.output_grads) for record in run.records] == outputs

"""Passes in evaluation mode count as training if the optimizer steps in this mode."""

from __future__ import annotations

import torch
from torch import nn

from telemetry.testing import CapturedRun, capture_run


def train(model: nn.Module, eval_from: int | None = None, validate: bool = False) -> CapturedRun:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with capture_run(model, rules=[]) as run:
        for step in range(6):
            if step == eval_from:
                model.eval()
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().mean().backward()
            if validate:
                was_training = model.training
                model.eval()
                model(torch.randn(4, 3))  # without no_grad()
                with torch.no_grad():
                    model(torch.randn(4, 3))
                model.train(was_training)
            optimizer.step()
    return run


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def test_a_model_left_in_evaluation_mode_is_measured_from_its_second_step_on() -> None:
    run = train(net(), eval_from=3)
    assert [record.eval_mode for record in run.records] == [False] * 3 + [True] * 3
    assert [len(record.outputs) for record in run.records] == [3, 3, 3, 0, 3, 3]
    assert [len(record.output_grads) for record in run.records] == [3, 3, 3, 0, 3, 3]


def test_a_model_that_starts_in_evaluation_mode_is_measured_at_once() -> None:
    run = train(net().eval())
    assert [len(record.outputs) for record in run.records] == [3] * 6


def test_validation_does_not_count_as_training() -> None:
    run = train(net(), validate=True)
    assert [record.outputs["0", 0].calls for record in run.records] == [1] * 6  # type: ignore[index]

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from telemetry import Alert
from tests.helpers.rules import rule
from tests.helpers.small_runs import draw, net, train


def found(steps: int = 230, **settings: Any) -> list[Alert]:
    return train(rule("same_batch"), steps, **settings)


def noisy() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_one_batch_at_every_step_is_noted_once(every: int) -> None:
    only = draw()
    [alert] = found(batch=lambda step: only, every=every)
    assert alert.severity == "note"
    assert 100 <= alert.step <= 120


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_loader_that_repeats_its_batches_in_order_is_not_noted(period: int) -> None:
    epoch = [draw() for _ in range(period)]
    assert found(batch=lambda step: epoch[step % period]) == []


def test_the_same_tokens_are_noted_and_other_tokens_are_not() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(24, 3))
    tokens, classes = torch.randint(9, (4, 3)), torch.randint(3, (4,))
    [alert] = found(130, model=model, batch=lambda step: (tokens, classes))
    assert alert.step <= 120
    assert found(130, model=model, batch=lambda s: (torch.randint(9, (4, 3)), classes)) == []


@pytest.mark.slow
def test_a_data_set_of_one_batch_is_not_noted_until_it_is_memorized() -> None:
    only, slow = draw(), net()
    assert found(model=noisy(), batch=lambda step: only) == []
    optimizer = SGD(slow.parameters(), 0.03, 0.9)  # the loss shows it after step 150
    [alert] = found(400, model=slow, optimizer=optimizer, batch=lambda step: only, every=150)
    assert 150 < alert.step < 300


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_a_loader_that_gets_stuck_is_noted_for_any_loss(every: int) -> None:
    last = draw()
    [alert] = found(
        400, model=noisy(), batch=lambda step: draw() if step < 83 else last, every=every
    )
    assert alert.step <= 300

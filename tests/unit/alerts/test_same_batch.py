from __future__ import annotations

import pytest
import torch

from telemetry.alerts.mistakes import SameBatch
from tests.helpers.small_runs import draw, net, train


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_one_batch_at_every_step_is_noted_once(every: int) -> None:
    only = draw()
    [alert] = train(SameBatch(), 230, batch=lambda step: only, every=every)
    assert alert.severity == "note"
    assert 100 <= alert.step <= 120


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_loader_that_repeats_its_batches_in_order_is_not_noted(period: int) -> None:
    epoch = [draw() for _ in range(period)]
    assert train(SameBatch(), 230, batch=lambda step: epoch[step % period]) == []


def test_the_same_tokens_are_noted_and_other_tokens_are_not() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(9, 8), torch.nn.Flatten(), torch.nn.Linear(24, 3)
    )
    tokens, classes = torch.randint(9, (4, 3)), torch.randint(3, (4,))
    [alert] = train(SameBatch(), 130, model=model, batch=lambda step: (tokens, classes))
    assert alert.step <= 120
    fresh = train(
        SameBatch(), 130, model=model, batch=lambda s: (torch.randint(9, (4, 3)), classes)
    )
    assert fresh == []


@pytest.mark.slow
def test_a_data_set_of_one_batch_is_not_noted_until_it_is_memorized() -> None:
    points, classes = draw()
    noisy = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    assert train(SameBatch(), 230, model=noisy, batch=lambda step: (points, classes)) == []
    assert len(train(SameBatch(), 230, batch=lambda step: (points, classes))) == 1


@pytest.mark.slow
def test_the_same_batch_is_reported_soon_after_the_loss_shows_it() -> None:
    points, classes = draw()
    slow = net()
    optimizer = torch.optim.SGD(slow.parameters(), 0.03, 0.9)
    [alert] = train(
        SameBatch(), 400, model=slow, optimizer=optimizer, batch=lambda step: (points, classes),
        every=150,
    )  # fmt: skip
    assert 150 < alert.step < 300


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_a_loader_that_gets_stuck_is_noted_for_any_loss(every: int) -> None:
    noisy = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(8, 3))
    last = draw()
    [alert] = train(
        SameBatch(), 400, model=noisy, batch=lambda step: draw() if step < 83 else last, every=every
    )
    assert alert.step <= 300

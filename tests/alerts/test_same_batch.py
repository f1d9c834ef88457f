from __future__ import annotations

import pytest
import torch
from small_runs import draw, train

from telemetry.alerts.same_batch import SameBatch


@pytest.mark.parametrize("every", [1, 10, 100])
def test_one_batch_for_ever_is_noted_once(every: int) -> None:
    only = draw()
    [alert] = train(SameBatch(), 230, batch=lambda step: only, every=every)
    assert alert.severity == "note"
    assert 100 <= alert.step <= 120


@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_loader_that_repeats_its_batches_in_their_order_is_none(period: int) -> None:
    epoch = [draw() for _ in range(period)]
    assert train(SameBatch(), 230, batch=lambda step: epoch[step % period]) == []


def test_tokens_are_recognized_too() -> None:
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

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from telemetry import Alert
from telemetry.alerts.weights import RoundedUpdates
from tests.helpers.figures import figures
from tests.helpers.small_runs import Batch, draw, net, train


def run(dtype: torch.dtype, rate: float, *, warm_up: float = 0.0, every: int = 10) -> list[Alert]:
    model = net().to(dtype)
    optimizer = SGD(model.parameters(), rate)

    def before(step: int) -> None:
        optimizer.param_groups[0]["lr"] = rate * (1 + warm_up * step)

    def batch(step: int) -> Batch:
        points, classes = draw()
        return points.to(dtype), classes

    rule = RoundedUpdates()
    return train(
        rule, 100, model=model, optimizer=optimizer, before=before, batch=batch, every=every
    )


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(
    ("dtype", "rate", "apart"), [(torch.bfloat16, 3e-4, 0.4), (torch.float16, 1e-4, 0.05)]
)
def test_updates_that_are_rounded_away_are_noted(
    dtype: torch.dtype, rate: float, apart: float, every: int
) -> None:
    (alert,) = run(dtype, rate, every=every)
    assert (alert.severity, alert.module_name) == ("note", None)
    assert 50 <= alert.step < 80
    assert alert.value <= alert.threshold
    assert figures(alert.summary)[:2] == [2, 2]
    assert apart in figures(alert.cause)  # %


def test_the_share_of_changed_weights_stays_below_its_bound() -> None:
    rule = RoundedUpdates()
    model = net().bfloat16()
    weights = [model.get_submodule(name).get_parameter("weight") for name in ("0", "3")]
    before = [weight.detach().clone() for weight in weights]
    shares: list[float] = []

    def compare(step: int) -> None:
        for weight, old in zip(weights, before, strict=True):
            shares.append(float(old[weight != old].float().norm() / old.float().norm()) ** 2)
            old.copy_(weight.detach())

    def batch(step: int) -> Batch:
        points, classes = draw()
        return points.bfloat16(), classes

    optimizer = AdamW(model.parameters(), 1e-4)
    train(rule, 30, model=model, optimizer=optimizer, before=compare, batch=batch, every=1)
    assert 0 < max(shares) <= max(rule._largest.values())


@pytest.mark.slow
def test_updates_that_change_weights_are_not_noted() -> None:
    assert run(torch.float32, 1e-3) == []
    assert run(torch.bfloat16, 1.0) == []
    assert run(torch.bfloat16, 1e-3, warm_up=0.01) == []


def test_mostly_zero_gradients_are_not_noted() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1000, 4), nn.Flatten(), nn.Linear(8, 3)).bfloat16()
    model[2].requires_grad_(False)

    def batch(step: int) -> Batch:
        return torch.randint(1000, (32, 2)), torch.randint(3, (32,))

    optimizer = SGD(model.parameters(), 1e-3)
    assert train(RoundedUpdates(), 100, model=model, optimizer=optimizer, batch=batch) == []

"""A loss that diverges: a rate that rose or began too high, gradients that are never zeroed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry import Alert
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import net, train

every_interval = pytest.mark.parametrize("every", [1, 10, 100])


@pytest.mark.slow
@every_interval
@pytest.mark.parametrize("ramp", [20, 60])
def test_a_learning_rate_that_rose_is_named_once_and_not_resolved(ramp: int, every: int) -> None:
    model = net()
    optimizer = Adam(model.parameters(), 3e-3)

    def rise(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * 300 ** min(1.0, max(0.0, (step - 202) / ramp))

    [alert] = train(
        rule("loss_divergence"), 400, model=model, optimizer=optimizer, before=rise, every=every
    )
    assert 203 <= alert.step <= 203 + ramp + 20
    assert 0.003 in figures(alert.cause)


@every_interval
def test_a_rate_that_is_far_too_high_from_the_first_step_is_named(every: int) -> None:
    model = net()
    optimizer = Adam(model.parameters(), 1.0)
    first, *_ = train(rule("loss_divergence"), 40, model=model, optimizer=optimizer, every=every)
    assert first.step <= 4
    assert figures(first.cause) == [1]


def without_zeroing(optimizer: str, rate: float, momentum: float = 0.0, **how: Any) -> list[Alert]:
    torch.manual_seed(0)
    layers = nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 16), nn.ReLU()
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    of_model = (
        Adam(model.parameters(), rate)
        if optimizer == "Adam"
        else SGD(model.parameters(), rate, momentum)
    )
    if clip := how.pop("clip", None):
        how["after_backward"] = lambda: nn.utils.clip_grad_norm_(model.parameters(), clip)
    how = {"zeroes": lambda step: False, **how}
    return train(rule("loss_divergence"), 160, model=model, optimizer=of_model, **how)


@pytest.mark.slow
@every_interval
@pytest.mark.parametrize("optimizer", [("Adam", 1e-3), ("SGD", 0.01, 0.9)])
def test_gradients_that_are_never_zeroed_are_named_early(
    optimizer: tuple[Any, ...], every: int
) -> None:
    [alert] = without_zeroing(*optimizer, every=every)
    assert alert.step <= 120
    assert "zero_grad()" in alert.advice[0]


@pytest.mark.slow
def test_unzeroed_gradients_are_found_with_clipping_and_accumulation() -> None:
    def run(zeroes: Callable[[int], bool], **how: Any) -> list[Alert]:
        return without_zeroing("SGD", 0.05, zeroes=zeroes, **how)

    [alert] = run(lambda step: False, clip=0.5, micro_batches=2)
    assert "zero_grad()" in alert.advice[0]
    assert run(lambda step: True, clip=0.5, micro_batches=2) == []
    begin, end = run(lambda step: step >= 60)
    assert (begin.stage, end.stage) == ("started", "resolved")
    assert end.step >= 60


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 1)

    def forward(self, series: Tensor) -> Tensor:
        total: Tensor = self.head(self.gru(series)[0][:, -1])[:, 0]
        return total


@pytest.mark.parametrize("every", [10, 100])
def test_unzeroed_gradients_replace_the_learning_rate_as_the_cause_once_they_are_proved(
    every: int,
) -> None:
    generator = torch.Generator().manual_seed(2)  # others prove it before the rate is blamed

    def batch(step: int) -> tuple[Tensor, Tensor]:
        series = torch.randn(32, 10, 4, generator=generator)
        return series, series[:, -3:, 0].sum(1)

    model = Sums()
    of_rate, of_sums = train(
        rule("loss_divergence"), 60, model=model, optimizer=SGD(model.parameters(), 0.05, 0.9),
        batch=batch, loss_function=F.mse_loss, zeroes=lambda step: False, every=every,
    )  # fmt: skip
    assert (of_rate.stage, of_sums.stage) == ("started", "escalated")
    assert figures(of_rate.cause) == [0.05]
    assert "zero_grad()" in of_sums.advice[0]
    assert of_rate.step < of_sums.step <= 30

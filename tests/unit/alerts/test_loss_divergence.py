from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from telemetry import Alert
from telemetry.alerts.divergence import LossDivergence
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import draw, net, train


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("ramp", [20, 60])
def test_a_learning_rate_that_rose_is_named_once_and_not_resolved(ramp: int, every: int) -> None:
    model = net()
    optimizer = Adam(model.parameters(), 3e-3)

    def rise(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 3e-3 * 300 ** min(1.0, max(0.0, (step - 202) / ramp))

    [alert] = train(
        LossDivergence(), 400, model=model, optimizer=optimizer, before=rise, every=every
    )
    assert 203 <= alert.step <= 203 + ramp + 20
    assert 0.003 in figures(alert.cause)


@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_rate_that_is_far_too_high_from_the_first_step_is_named(every: int) -> None:
    model = net()
    first, *_ = train(
        LossDivergence(), 40, model=model, optimizer=Adam(model.parameters(), 1.0), every=every
    )
    assert first.step <= 4
    assert figures(first.cause) == [1]


def never_zeroed(
    make: Callable[[nn.Module], Optimizer],
    *,
    every: int,
    clip: float | None = None,
    zero_from: int = 10**9,
    accumulate: int = 1,
) -> list[Alert]:
    model = nn.Sequential(
        nn.Linear(8, 32),
        nn.LayerNorm(32),
        nn.Tanh(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 3),
    )
    optimizer = make(model)
    torch.manual_seed(1)
    with capture_run(model, every_n_steps=every, rules=[LossDivergence()]) as run:
        for step in range(160):
            if step >= zero_from:
                optimizer.zero_grad()
            for _ in range(accumulate):
                points, classes = draw()
                loss = F.cross_entropy(model(points), classes)
                (loss / accumulate).backward()
            run.log(loss=loss)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return run.alerts


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
@pytest.mark.parametrize("adam", [True, False])
def test_gradients_that_are_never_zeroed_are_named_early(adam: bool, every: int) -> None:
    def make(model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), 1e-3) if adam else SGD(model.parameters(), 0.01, 0.9)

    [alert] = never_zeroed(make, every=every)
    assert alert.step <= 120
    assert "zero_grad()" in alert.advice[0]


@pytest.mark.slow
def test_unzeroed_gradients_are_found_with_clipping_and_accumulation() -> None:
    def make(model: nn.Module) -> Optimizer:
        return SGD(model.parameters(), 0.05)

    [alert] = never_zeroed(make, every=10, clip=0.5, accumulate=2)
    assert "zero_grad()" in alert.advice[0]
    assert never_zeroed(make, every=10, clip=0.5, accumulate=2, zero_from=0) == []
    begin, end = never_zeroed(make, every=10, zero_from=60)
    assert (begin.stage, end.stage) == ("started", "resolved")
    assert end.step >= 60


@pytest.mark.parametrize("every", [10, 100])
def test_unzeroed_gradients_replace_the_learning_rate_as_the_cause_once_they_are_proved(
    every: int,
) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru, self.head = nn.GRU(4, 32, batch_first=True), nn.Linear(32, 1)

        def forward(self, series: Tensor) -> Tensor:
            total: Tensor = self.head(self.gru(series)[0][:, -1])[:, 0]
            return total

    torch.manual_seed(0)
    model = Sums()
    optimizer = SGD(model.parameters(), 0.05, 0.9)
    with capture_run(model, every_n_steps=every, rules=[LossDivergence()]) as run:
        for _ in range(60):
            series = torch.randn(32, 10, 4)
            loss = F.mse_loss(model(series), series[:, -3:, 0].sum(1))
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    of_rate, of_sums = run.alerts
    assert (of_rate.stage, of_sums.stage) == ("started", "escalated")
    assert figures(of_rate.cause) == [0.05]
    assert "zero_grad()" in of_sums.advice[0]
    assert of_rate.step < of_sums.step <= 30

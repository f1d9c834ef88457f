from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from telemetry import Alert, Rule
from telemetry.alerts.losses import UnboundedLoss
from telemetry.alerts.weights import ExponentialTrend
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import draw, net, train


def run(
    rule: Rule,
    steps: int,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    optimizer: Callable[[nn.Module], Optimizer] = lambda model: Adam(model.parameters(), 1e-3),
    every: int = 10,
) -> list[Alert]:
    model = net()
    steps_it = optimizer(model)
    torch.manual_seed(1)
    with capture_run(model, every_n_steps=every, rules=[rule]) as recorded:
        for _ in range(steps):
            steps_it.zero_grad()
            loss = loss_of(model)
            loss.backward()
            recorded.log(loss=loss)
            steps_it.step()
    return recorded.alerts


def cross_entropy(model: nn.Module) -> Tensor:
    points, classes = draw()
    return F.cross_entropy(model(points), classes)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 50])
def test_weights_that_decay_too_fast_are_reported_while_half_is_left(every: int) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), 1e-3, weight_decay=20.0)

    def guess(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(torch.randn(32, 8)), torch.randint(3, (32,)))

    (alert,) = run(ExponentialTrend(), 400, guess, optimizer=optimizer, every=every)
    assert figures(alert.summary)[0] == pytest.approx(0.02, rel=0.1)  # rate times decay
    assert alert.threshold == 0.5
    assert 0.05 < alert.value < 0.5
    assert run(ExponentialTrend(), 400, guess, every=every) == []


@pytest.mark.slow
def test_weights_that_shrink_while_the_model_learns_are_not_reported() -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(10)
        return AdamW(model.parameters(), 1e-2, weight_decay=3.0)

    assert run(ExponentialTrend(), 300, cross_entropy, optimizer=optimizer) == []


def test_weights_that_grow_by_a_decay_of_the_wrong_sign_are_reported() -> None:
    model = net()

    def grow(step: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.03)

    optimizer = SGD(model.parameters(), 1e-6)
    alerts = train(ExponentialTrend(), 150, model=model, optimizer=optimizer, before=grow)
    assert 0.03 in figures(alerts[0].summary)


@pytest.mark.slow
@pytest.mark.parametrize("discount", [0.9, 1.1])
def test_a_self_reinforcing_loss_is_reported(discount: float) -> None:
    def loss(model: nn.Module) -> Tensor:
        points, _ = draw()
        with torch.no_grad():
            targets = 1 + discount * model(points)
        return F.mse_loss(model(points), targets)

    alerts = run(
        ExponentialTrend(), 500, loss, optimizer=lambda model: SGD(model.parameters(), 0.01)
    )
    messages = [alert.summary for alert in alerts]
    assert any("The loss grows by" in message for message in messages) == (discount > 1)
    assert bool(messages) == (discount > 1)


@pytest.mark.parametrize(
    ("factor", "first", "is_reported"), [(1.25, 1e-2, True), (0.8, 0.3, False), (1.25, 1e-5, False)]
)
def test_a_rate_that_grows_exponentially_is_reported_when_steps_are_large(
    factor: float, first: float, is_reported: bool
) -> None:
    model = net()
    optimizer = Adam(model.parameters(), first)

    def schedule(step: int) -> None:
        optimizer.param_groups[0]["lr"] = min(first * factor ** (step // 10), 1e-3 + 10 * first)

    alerts = train(ExponentialTrend(), 150, model=model, optimizer=optimizer, before=schedule)
    assert bool(alerts) == is_reported
    for alert in alerts:
        assert {1.25, 0.01} <= {*figures(alert.summary)}
        assert alert.step < 100


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_cross_entropy_of_the_wrong_sign_is_reported_when_it_has_fallen_by_a_tenth(
    every: int,
) -> None:
    (alert,) = run(UnboundedLoss(), 200, lambda model: -cross_entropy(model), every=every)
    assert alert.threshold == pytest.approx(-1.0986, abs=1e-4)  # -ln 3
    assert 1.099 in figures(alert.summary)
    assert alert.value > -1.5


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_logits_in_place_of_log_probabilities_are_reported(every: int) -> None:
    def loss(model: nn.Module) -> Tensor:
        points, classes = draw()
        return F.nll_loss(model(points), classes)

    def optimizer(model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), 1e-2)

    (alert,) = run(UnboundedLoss(), 250, loss, optimizer=optimizer, every=every)
    assert 3 in figures(alert.summary)  # the output that grows


@pytest.mark.slow
def test_a_density_is_not_a_loss_of_the_wrong_sign() -> None:
    def loss(model: nn.Module) -> Tensor:
        points, _ = draw()
        mean, log_scale, _ = model(points).T
        off = (0.1 * points[:, 0] - mean) * torch.exp(-log_scale)
        return (off**2 / 2 + log_scale).mean()

    losses: list[float] = []
    assert run(UnboundedLoss(), 400, lambda m: losses.append(v := loss(m)) or v) == []  # type: ignore[func-returns-value]
    assert losses[-1] < -1.5


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "rate"), [(1e5, 1e-2), (3e4, 3e-2), (1e6, 2e-2)])
def test_weights_that_adam_moves_evenly_towards_large_targets_are_not_reported(
    unit: float, rate: float
) -> None:
    def loss(model: nn.Module) -> Tensor:
        points, _ = draw()
        targets = unit * points[:, :3]
        return F.mse_loss(model(points), targets)

    def adam(model: nn.Module) -> Optimizer:
        return Adam(model.parameters(), rate)

    assert run(ExponentialTrend(), 200, loss, optimizer=adam) == []

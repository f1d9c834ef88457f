"""Rules about outputs: those that collapse, and losses that fall while outputs grow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import at_step, captured, classify, draw, net, toward, train


def mlp(outputs: int, *end: nn.Module, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), activation(), nn.Linear(32, outputs), *end)


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
@pytest.mark.parametrize("left", [0.0, 0.3])
def test_an_output_that_becomes_one_vector_is_named(left: float, every: int) -> None:
    model = mlp(16, nn.Linear(16, 3))
    layer = model[2]
    collapse = at_step(150, lambda: (layer.weight.data.mul_(left), layer.bias.data.fill_(1.0)))
    settings = {"model": model, "optimizer": SGD(model.parameters(), 1e-5), "before": collapse}
    alerts = train(rule("output_collapse"), 320, every=every, **settings)
    named = [alert.module_name for alert in alerts if alert.stage == "started"]
    assert named == ([] if left else ["2"])
    assert all(alert.value < alert.threshold for alert in alerts)


@pytest.mark.parametrize(
    ("outputs", "offset", "rate", "steps"), [(1, 100, 3e-2, 200), (8, 290, 0.05, 800)]
)
def test_outputs_far_from_zero_have_not_collapsed(
    outputs: int, offset: float, rate: float, steps: int
) -> None:
    model = mlp(outputs)
    loss_of = toward(model, lambda x: offset + x[:, :outputs])
    optimizer = Adam(model.parameters(), rate)
    settings = {"loss_of": loss_of, "optimizer": optimizer, "every": 5}
    assert captured(model, steps, rules=["output_collapse"], **settings).alerts == []


def test_equal_inputs_are_no_collapse_of_the_outputs() -> None:
    model = mlp(8)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 8) if step < 60 else torch.zeros(64, 8)
        return F.mse_loss(model(x), x)

    settings = {"loss_of": loss_of, "optimizer": SGD(model.parameters(), 0.05), "every": 1}
    assert captured(model, 90, rules=["output_collapse"], **settings).alerts == []


def constant(weight: float) -> nn.Module:
    model = mlp(32, nn.Tanh(), nn.Linear(32, 3), activation=nn.Tanh)
    for parameter in model.parameters():
        nn.init.constant_(parameter, weight)
    return model


@pytest.mark.parametrize("every", [1, 10, 100])
def test_units_that_start_equal_and_stay_equal_are_reported(every: int) -> None:
    (alert,) = train(rule("output_collapse"), 40, model=constant(0.02), every=every)
    assert (alert.step < 20, alert.module_name) == (True, "0")
    assert 32 in figures(alert.summary)


def test_units_that_are_zero_or_differ_are_not_reported() -> None:
    zero_head = mlp(16, nn.Linear(16, 3), activation=nn.Tanh)
    nn.init.zeros_(zero_head[2].weight)
    nn.init.constant_(zero_head[2].bias, 0.5)
    assert train(rule("output_collapse"), 40, model=zero_head, every=1) == []
    assert train(rule("output_collapse"), 3, model=constant(0.0), every=1) == []


def unbounded(steps: int, loss_of: Callable[[nn.Module], Tensor], rate: float, **more: Any) -> Any:
    model = net()
    settings = {"loss_of": lambda step: loss_of(model), "optimizer": Adam(model.parameters(), rate)}
    return captured(model, steps, rules=["unbounded_loss"], **settings, **more)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_cross_entropy_of_the_wrong_sign_is_reported_when_it_has_fallen_by_a_tenth(
    every: int,
) -> None:
    (alert,) = unbounded(200, lambda model: -classify(model), 1e-3, every=every).alerts
    assert alert.threshold == pytest.approx(-1.0986, abs=1e-4)  # -ln 3
    assert 1.099 in figures(alert.summary)
    assert alert.value > -1.5


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_logits_in_place_of_log_probabilities_are_reported(every: int) -> None:
    def loss_of(model: nn.Module) -> Tensor:
        points, classes = draw()
        return F.nll_loss(model(points), classes)

    (alert,) = unbounded(250, loss_of, 1e-2, every=every).alerts
    assert 3 in figures(alert.summary)  # the output that grows


@pytest.mark.slow
def test_a_density_is_not_a_loss_of_the_wrong_sign() -> None:
    def loss_of(model: nn.Module) -> Tensor:
        points, _ = draw()
        mean, log_scale, _ = model(points).T
        off = (0.1 * points[:, 0] - mean) * torch.exp(-log_scale)
        return (off**2 / 2 + log_scale).mean()

    run = unbounded(400, loss_of, 1e-3)
    assert run.alerts == []
    assert run.records[-1].loss < -1.5

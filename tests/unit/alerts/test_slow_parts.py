from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry.alerts.outputs import OutputCollapse
from telemetry.alerts.weights import LayersNotLearning
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import draw, train


def deep() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def by_layer(model: nn.Sequential, decay: float) -> Adam:
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    rates = [1e-2 * decay**depth for depth in range(len(layers))][::-1]
    groups: Iterator[tuple[nn.Linear, float]] = zip(layers, rates, strict=True)
    return Adam([{"params": [*layer.parameters()], "lr": rate} for layer, rate in groups])


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_a_layer_whose_rate_has_vanished_is_named(every: int) -> None:
    model = deep()
    alert, *rest = train(
        LayersNotLearning(), 350, model=model, optimizer=by_layer(model, 0.003), every=every
    )
    assert (alert.severity, alert.module_name) == ("warning", "0")
    assert alert.value < alert.threshold
    assert 100 <= alert.step <= 220
    assert not rest


@pytest.mark.slow
def test_rates_of_fine_tuning_and_layers_without_gradient_are_not_reported() -> None:
    model = deep()
    assert train(LayersNotLearning(), 250, model=model, optimizer=by_layer(model, 0.2)) == []
    model[0].requires_grad_(False)
    assert train(LayersNotLearning(), 250, model=model, optimizer=by_layer(model, 0.2)) == []


@pytest.mark.parametrize("every", [10, 100])
def test_gradients_that_have_become_small_are_the_cause(every: int) -> None:
    model = deep()
    optimizer = SGD(model.parameters(), 0.1)

    def fade(grad: torch.Tensor) -> torch.Tensor:  # as behind a discriminator that wins
        return grad * (1e-6 if faded else 1.0)

    faded = False
    model[1].register_full_backward_hook(lambda module, grads, _: (fade(grads[0]),))

    def before(step: int) -> None:
        nonlocal faded
        faded = step >= 40

    alert, *_ = train(
        LayersNotLearning(), 310, model=model, optimizer=optimizer, before=before, every=every
    )
    assert alert.module_name == "0"
    assert max(figures(alert.cause)) > 1000
    assert "learning rate" not in (alert.cause or "")


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "resolves"), [(1.5e-6, False), (4e-6, True), (1e-2, True)])
def test_the_alert_resolves_when_the_layer_moves_again_and_not_near_the_limit(
    rate: float, resolves: bool
) -> None:
    model = deep()
    optimizer = by_layer(model, 0.003)

    def raise_rate(step: int) -> None:
        if step == 200:
            optimizer.param_groups[0]["lr"] = rate

    begin, *end = train(
        LayersNotLearning(), 300, model=model, optimizer=optimizer, before=raise_rate
    )
    assert begin.stage == "started"
    assert [(alert.stage, 200 < alert.step <= 240) for alert in end] == [
        ("resolved", True)
    ] * resolves


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
@pytest.mark.parametrize("left", [0.0, 0.3])
def test_an_output_that_becomes_one_vector_is_named(left: float, every: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.Linear(16, 3))

    def collapse(step: int) -> None:
        if step == 150:
            with torch.no_grad():
                model[2].weight.mul_(left)
                model[2].bias.fill_(1.0)

    optimizer = SGD(model.parameters(), 1e-5)
    rule = OutputCollapse()
    alerts = train(rule, 320, model=model, optimizer=optimizer, before=collapse, every=every)
    named = [alert.module_name for alert in alerts if alert.stage == "started"]
    assert named == ([] if left else ["2"])
    assert all(alert.value < alert.threshold for alert in alerts)


def test_one_number_far_from_zero_is_not_a_collapse() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    optimizer = Adam(model.parameters(), 3e-2)
    with capture_run(model, rules=[OutputCollapse()], every_n_steps=10) as run:
        for _ in range(200):
            points, _ = draw()
            loss = F.mse_loss(model(points)[:, 0], 100 + points[:, 0])
            optimizer.zero_grad()
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    assert run.alerts == []


def constant(weight: float) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 3)
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, weight)
    return model


@pytest.mark.parametrize("every", [1, 10, 100])
def test_units_that_start_equal_and_stay_equal_are_reported(every: int) -> None:
    (alert,) = train(OutputCollapse(), 40, model=constant(0.02), every=every)
    assert (alert.step < 20, alert.module_name) == (True, "0")
    assert 32 in figures(alert.summary)


def test_units_that_are_zero_or_differ_are_not_reported() -> None:
    torch.manual_seed(0)
    zero_head = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Linear(16, 3))
    nn.init.zeros_(zero_head[2].weight)
    nn.init.constant_(zero_head[2].bias, 0.5)
    assert train(OutputCollapse(), 40, model=zero_head, every=1) == []
    assert train(OutputCollapse(), 3, model=constant(0.0), every=1) == []

"""Rules in models and loops that look odd and are right, or look right and are broken."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

from telemetry import Alert, Detector
from telemetry.alerts.divergence import LossDivergence
from telemetry.alerts.exploding import ExplodingActivation, ExplodingGradient
from telemetry.alerts.losses import LossSpike
from telemetry.alerts.nonfinite import Nonfinite
from telemetry.alerts.outputs import OutputCollapse
from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.alerts.weights import LayersNotLearning
from telemetry.testing import CapturedRun, capture_run

Step = Callable[[int, nn.Module, CapturedRun], None]


def run(model: nn.Module, step: Step, *rules: Detector, steps: int, every: int = 1) -> list[Alert]:
    torch.manual_seed(0)
    with capture_run(model, every_n_steps=every, rules=rules) as captured:
        for number in range(steps):
            step(number, model, captured)
    return captured.alerts


def fits(optimizer: Optimizer, loss_of: Callable[[nn.Module], Tensor]) -> Step:
    """Return usual steps."""

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        captured.log(loss=loss)
        optimizer.step()

    return step


class Scaled(nn.Module):
    """Converts outputs to the unit of the targets."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


def mlp(*end: nn.Module, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, outputs), *end)


def test_a_unit_of_the_outputs_is_no_explosion() -> None:
    model = mlp(Scaled(1e5))

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), 1e5 * x.sum(1, keepdim=True))

    rules = ExplodingGradient(), ExplodingActivation()
    assert run(model, fits(Adam(model.parameters(), 1e-3), loss_of), *rules, steps=20) == []


def test_outputs_far_from_zero_have_not_collapsed() -> None:
    model = mlp(outputs=8)

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(64, 8)
        return F.mse_loss(model(x), 290 + x)

    step = fits(Adam(model.parameters(), 0.05), loss_of)
    assert run(model, step, OutputCollapse(), steps=800, every=5) == []


def test_equal_inputs_are_no_collapse_of_the_outputs() -> None:
    model = mlp(outputs=8)
    number = 0

    def loss_of(model: nn.Module) -> Tensor:
        nonlocal number
        number += 1
        x = torch.randn(64, 8) if number < 60 else torch.zeros(64, 8)
        return F.mse_loss(model(x), x)

    step = fits(SGD(model.parameters(), 0.05), loss_of)
    assert run(model, step, OutputCollapse(), steps=90) == []


def test_a_rate_that_jumps_with_another_loss_is_a_note() -> None:
    torch.manual_seed(0)
    trunk, first, second = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 2)
    model = nn.ModuleList([trunk, first, second])
    optimizer = SGD(model.parameters(), 0.02)

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        x = torch.randn(32, 8)
        if number == 150:
            optimizer.param_groups[0]["lr"] = 0.2
        hidden = torch.relu(trunk(x))
        if number < 150:
            loss = 0.1 * F.mse_loss(first(hidden), x) + 0 * second(hidden).sum()
        else:
            loss = 3 * F.cross_entropy(second(hidden), (x[:, 0] > 0).long())
        optimizer.zero_grad()
        loss.backward()
        captured.log(loss=loss)
        optimizer.step()

    [alert] = run(model, step, LossSpike(), steps=170)
    assert alert.severity == "note"
    assert alert.cause is not None
    assert "another loss" in alert.cause


def test_a_bias_before_batch_norm_has_no_vanishing_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 2)
    )
    model[0].weight.requires_grad_(False)

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 1, 8, 8)
        return F.cross_entropy(model(x), (x.mean((1, 2, 3)) > 0).long())

    step = fits(Adam(model.parameters(), 1e-3), loss_of)
    assert run(model, step, VanishingGradient(), steps=60) == []


def test_gradients_of_a_second_pass_are_no_sums() -> None:
    model = mlp(outputs=2)
    optimizer = SGD(model.parameters(), 0.05)

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        x, y = torch.ones(32, 8), torch.zeros(32, dtype=torch.long)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [1e-3 * p.grad for p in model.parameters() if p.grad is not None]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter += move
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter -= move
        captured.log(loss=loss)
        optimizer.step()

    assert run(model, step, LossDivergence(), steps=30) == []


def test_a_buffer_made_as_nan_is_no_fault_and_one_that_becomes_nan_is() -> None:
    model = mlp(outputs=2)
    model.register_buffer("average", torch.full((3,), math.nan))
    model.register_buffer("other", torch.zeros(3))

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x[:, :2])

    usual = fits(SGD(model.parameters(), 0.05), loss_of)

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        if number == 20:
            model.other.fill_(math.nan)
        usual(number, model, captured)

    [alert] = run(model, step, Nonfinite(), steps=30)
    assert alert.step == 20
    assert "the buffer other" in alert.summary


def test_infinite_running_statistics_are_told() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
    usual = fits(
        SGD(model.parameters(), 0.01), lambda model: model(torch.randn(32, 8)).square().mean()
    )

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        if number == 10:
            model.get_buffer("1.running_var").fill_(math.inf)
        usual(number, model, captured)

    [alert] = run(model, step, Nonfinite(), steps=20)
    assert (alert.step, alert.module_name) == (10, "1")


def test_an_explosion_does_not_resolve_while_gradients_are_nan() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=2.0)
    model = nn.Sequential(nn.Linear(16, 16), *layers)
    initial = copy.deepcopy(model.state_dict())

    def step(number: int, model: nn.Module, captured: CapturedRun) -> None:
        model.load_state_dict(initial)
        model.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean() * (math.nan if number > 3 else 1.0)
        loss.backward()
        captured.log(loss=loss)
        optimizer.step()

    optimizer = SGD(model.parameters(), 0.0)
    stages = [alert.stage for alert in run(model, step, ExplodingActivation(), steps=20)]
    assert stages == ["started"]


def test_no_layer_is_slower_than_others_that_stand_still() -> None:
    model = mlp(outputs=8)
    optimizer = SGD(
        [
            {"params": model[0].parameters(), "lr": 1e-18},
            {"params": model[2].parameters(), "lr": 1e-12},
        ]
    )

    def loss_of(model: nn.Module) -> Tensor:
        x = torch.randn(32, 8)
        return F.mse_loss(model(x), x)

    assert run(model, fits(optimizer, loss_of), LayersNotLearning(), steps=250, every=10) == []

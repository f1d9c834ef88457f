"""Unusual models and programs of others: no warning where they are right, a name where not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import telemetry
from telemetry import Alert, HookLogger
from telemetry.interventions import zero_gradients
from telemetry.testing import alerts_of, capture_run
from tests.helpers.applied import Applied
from tests.helpers.rules import rule
from tests.helpers.scripted import record
from tests.helpers.small_runs import Before, at_step, captured, mlp, toward


def loud(alerts: list[Alert]) -> list[str]:
    return [alert.kind for alert in alerts if alert.severity != "note"]


@pytest.mark.parametrize("every", [1, 10])
def test_a_head_whose_loss_is_switched_off_is_no_explosion(every: int) -> None:
    torch.manual_seed(0)
    trunk, main, auxiliary = nn.Linear(16, 64), nn.Linear(64, 10), nn.Linear(64, 10)
    model, classes_of = nn.ModuleList([trunk, main, auxiliary]), torch.randn(16, 10)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 16)
        hidden, classes = trunk(x).relu(), (x @ classes_of).argmax(1)
        loss = F.cross_entropy(main(hidden), classes)
        weight = 0.3 if step < 60 else 1e-5
        return loss + weight * F.cross_entropy(auxiliary(hidden), classes)

    optimizer = SGD(model.parameters(), 0.05)
    run = captured(model, 220, rules=None, loss_of=loss_of, optimizer=optimizer, every=every)
    assert loud(run.alerts) == []


def decorrelation(module: nn.Module, x: Tensor) -> Tensor:
    """Mean squared correlation of different features: one number."""
    second = x.transpose(-1, -2) @ x / x.shape[-2]
    off = second.square().sum((-1, -2)) - second.diagonal(dim1=-2, dim2=-1).square().sum(-1)
    return off.mean() / (x.shape[-1] * (x.shape[-1] - 1))


def test_a_module_that_computes_a_loss_is_not_saturated() -> None:
    torch.manual_seed(0)
    first, norm, head = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 10)
    loss = Applied(decorrelation)  # between other layers
    model, classes_of = nn.ModuleList([first, norm, loss, head]), torch.randn(16, 10)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(8, 16, 16)
        hidden = norm(first(x))
        part: Tensor = loss(hidden)
        classes = (x[:, 0] @ classes_of).argmax(1)
        return F.cross_entropy(head(hidden[:, 0]), classes) + 0.1 * part

    optimizer = Adam(model.parameters(), 3e-4)
    run = captured(model, 60, rules=None, loss_of=loss_of, optimizer=optimizer)
    assert loud(run.alerts) == []


def test_of_two_optimizers_of_one_model_the_one_that_ends_steps_counts() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    first, second = (SGD(model.parameters(), 1e-4) for _ in range(2))
    used = []
    with capture_run(model) as run:
        for _ in range(12):
            x = torch.randn(32, 8)
            for optimizer, scale in ((first, 1.0), (second, 100.0)):
                optimizer.zero_grad()
                (scale * (model(x) - 1).square().mean()).backward()
                if optimizer is first:
                    used.append([float(p.grad.norm()) for p in model.parameters()])
                optimizer.step()
    assert [record.grad_norms.tolist() for record in run.records] == [
        pytest.approx(norms, rel=1e-5) for norms in used
    ]


def trend(rate: Callable[[int], float]) -> list[Alert]:
    """Return the alerts of weights that change by a factor at a loss that does not fall."""
    model = mlp(20, 32, 32, 10)

    def loss_of(step: int) -> Tensor:
        for parameter in model.parameters():
            parameter.data *= 1 - rate(step)
        return 0 * model(torch.randn(64, 20)).square().mean() + 3 + 0.3 * torch.rand(())

    run = captured(model, 150, rules=None, loss_of=loss_of)
    return [alert for alert in run.alerts if alert.kind == "exponential_trend"]


def test_weights_shrink_only_below_their_first_size() -> None:
    assert [alert.value < 1 for alert in trend(lambda step: 0.03)] == [True]
    # They are still 2.3 times as large as at first at the end.
    assert trend(lambda step: -0.9 if step < 5 else 0.02) == []


def test_layers_in_a_plain_list_are_named_with_the_way_out(tmp_path: Path) -> None:
    model = nn.Module()
    model.layers = [nn.Linear(4, 4), nn.Linear(4, 2)]  # PyTorch does not find them
    with pytest.raises(ValueError, match=r"modules in layers in a torch\.nn\.ModuleList"):
        HookLogger(model, tmp_path)


@pytest.mark.parametrize(("factor", "is_far"), [(1.0, False), (256.0, True), (1 / 65025, True)])
def test_inputs_far_from_standardized_are_named_before_training(
    factor: float, is_far: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    inputs, classes = factor * torch.rand(32, 8), torch.randint(3, (32,))
    result = telemetry.check(model, inputs, nn.CrossEntropyLoss(), targets=classes, show=False)
    assert ("input_scale" in [found.kind for found in result.findings]) == is_far
    normed = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))
    result = telemetry.check(normed, inputs, nn.CrossEntropyLoss(), targets=classes, show=False)
    assert "input_scale" not in [found.kind for found in result.findings]


def classify(
    model: nn.Module, steps: int, *, before: Before = lambda step: None, are_random: bool = False
) -> list[Alert]:
    """Train a classifier of ten classes, and return its alerts."""
    torch.manual_seed(0)
    centers = 2 * torch.randn(10, 20)

    def loss_of(step: int) -> Tensor:
        classes = torch.randint(10, (256,))
        outputs = model(centers[classes] + torch.randn(256, 20))
        return F.cross_entropy(outputs, torch.randint(10, (256,)) if are_random else classes)

    optimizer = SGD(model.parameters(), 0.1)
    settings = {"loss_of": loss_of, "optimizer": optimizer, "before": before, "seed": 0}
    return captured(model, steps, rules=None, **settings).alerts


@pytest.mark.parametrize("are_random", [False, True])
def test_units_that_die_where_nothing_can_be_learned_are_not_the_cause(are_random: bool) -> None:
    model = mlp(20, 32, 32, 10)
    kill = at_step(60, lambda: nn.init.constant_(model[2].bias[1:], -100.0))
    alerts = classify(model, 320, before=kill, are_random=are_random)
    kinds = {alert.kind for alert in alerts if alert.stage == "started"}
    assert kinds == {"dead_units"} | ({"loss_stuck"} if are_random else set())
    advice = next(alert.advice[0] for alert in alerts if alert.kind == "dead_units")
    assert ("target" in advice) == are_random


def test_gradients_that_are_set_to_zero_are_no_vanishing_ones() -> None:
    model = mlp(20, 32, 32, 10)
    with zero_gradients(model, "0"):
        [alert] = classify(model, 60)
    assert (alert.kind, alert.severity, alert.module_name) == ("vanishing_gradient", "note", "0")
    assert "zero_gradients()" in alert.advice[0]


@pytest.mark.parametrize("with_biases", [False, True])
def test_weights_that_start_at_zero_are_the_cause(with_biases: bool) -> None:
    model = mlp(20, 32, 32, 10)
    for name, parameter in model.named_parameters():
        if with_biases or name.endswith("weight"):
            nn.init.zeros_(parameter)
    first, *_ = classify(model, 140)
    assert "started at 0" in (first.cause or "")
    assert "nitializ" in first.advice[0]


@pytest.mark.parametrize("are_longer", [False, True])
def test_a_loss_that_is_a_sum_over_longer_episodes_does_not_diverge(are_longer: bool) -> None:
    records = [
        record(
            step, full=True, update_ratios={"0.weight": 0.3}, examples=(10 + step % 7) * more,
            scalars={"loss": (16.0 - step % 7) * (8 if step >= 30 else 1)},
        )
        for step in range(50)
        for more in [8 if are_longer and step >= 30 else 1]
    ]  # fmt: skip
    assert loud(alerts_of(records)) == ([] if are_longer else ["loss_divergence"])


# --- unusual models and loops --------------------------------------------------------------------


def blocks(gain: float = 1.0) -> Any:
    """Return residual blocks over tokens; ``gain`` is the initial scale of each branch."""

    def apply(self: Any, tokens: Tensor) -> Any:
        x = self.embed(tokens) + self.positions
        for gain, block in zip(self.gains, self.blocks, strict=True):
            x = x + gain * block(x)
        return self.head(x)

    torch.manual_seed(0)
    parts = [
        nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        for _ in range(3)
    ]
    layers = {"embed": nn.Embedding(50, 16), "blocks": nn.ModuleList(parts)}
    model = Applied(apply, **layers, head=nn.Linear(16, 50))
    model.positions = nn.Parameter(torch.zeros(8, 16))
    model.gains = nn.Parameter(torch.full((3,), gain))
    return model


def frozen(model: nn.Module) -> nn.Module:
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [blocks(), blocks(gain=0.0), frozen(blocks())],
    ids=["positions of zeros", "branches that start at zero", "frozen"],
)
def test_permanent_conditions_request_no_full_step_and_raise_no_alert(model: nn.Module) -> None:
    def loss_of(step: int) -> Tensor:
        tokens = torch.randint(0, 49, (8, 8))
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() + 1)

    optimizer = Adam(model.parameters(), 3e-3)
    run = captured(model, 150, rules=None, loss_of=loss_of, optimizer=optimizer, every=100)
    assert [record.step for record in run.records if record.full] == [0, 100]
    assert run.alerts == []


def test_a_unit_of_the_outputs_is_no_explosion() -> None:
    model = mlp(8, 32, 1)
    model.append(Applied(lambda self, x: 1e5 * x))  # converts it to that of the targets
    loss_of = toward(model, lambda x: 1e5 * x.sum(1, keepdim=True))
    rules = "exploding_gradient", "exploding_activation"
    optimizer = Adam(model.parameters(), 1e-3)
    run = captured(model, 20, rules=rules, loss_of=loss_of, optimizer=optimizer, every=1)
    assert run.alerts == []


def test_a_rate_that_jumps_with_another_loss_is_a_note() -> None:
    torch.manual_seed(0)
    trunk, first, second = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 2)
    model = nn.ModuleList([trunk, first, second])
    optimizer = SGD(model.parameters(), 0.02)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(32, 8)
        hidden = torch.relu(trunk(x))
        if step < 150:
            return 0.1 * F.mse_loss(first(hidden), x) + 0 * second(hidden).sum()
        optimizer.param_groups[0]["lr"] = 0.2
        return 3 * F.cross_entropy(second(hidden), (x[:, 0] > 0).long())

    rules = ["loss_spike"]
    [alert] = captured(model, 170, rules=rules, loss_of=loss_of, optimizer=optimizer).alerts
    assert alert.severity == "note"
    assert "another loss" in (alert.cause or "")


def test_gradients_of_a_second_pass_are_no_sums() -> None:
    model = mlp(8, 32, 2)
    optimizer = SGD(model.parameters(), 0.05)
    x, y = torch.ones(32, 8), torch.zeros(32, dtype=torch.long)
    with capture_run(model, rules=[rule("loss_divergence")]) as run:
        for _ in range(30):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            moves = [1e-3 * p.grad for p in model.parameters() if p.grad is not None]
            for sign in (1, -1):
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.data += sign * move
                if sign > 0:
                    optimizer.zero_grad()
                    loss = F.cross_entropy(model(x), y)
                    loss.backward()
            run.log(loss=loss)
            optimizer.step()
    assert run.alerts == []


def test_an_explosion_does_not_resolve_while_gradients_are_nan() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=2.0)
    model = nn.Sequential(nn.Linear(16, 16), *layers)
    initial = {name: value.clone() for name, value in model.state_dict().items()}

    def loss_of(step: int) -> Tensor:
        model.load_state_dict(initial)
        return model(torch.randn(8, 16)).square().mean() * (math.nan if step > 3 else 1.0)

    optimizer, rules = SGD(model.parameters(), 0.0), ["exploding_gradient"]
    run = captured(model, 20, rules=rules, loss_of=loss_of, optimizer=optimizer, every=1)
    assert [alert.stage for alert in run.alerts] == ["started"]

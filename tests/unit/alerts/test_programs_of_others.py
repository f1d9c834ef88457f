"""Healthy programs of others stay without a warning; figures belong to the step that counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

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
from tests.helpers.scripted import record
from tests.helpers.small_runs import Before, at_step, captured


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
    model = layers()

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


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
                         nn.Linear(32, 10))  # fmt: skip


@pytest.mark.parametrize("are_random", [False, True])
def test_units_that_die_where_nothing_can_be_learned_are_not_the_cause(are_random: bool) -> None:
    model = layers()
    kill = at_step(60, lambda: nn.init.constant_(model[2].bias[1:], -100.0))
    alerts = classify(model, 320, before=kill, are_random=are_random)
    kinds = {alert.kind for alert in alerts if alert.stage == "started"}
    assert kinds == {"dead_units"} | ({"loss_stuck"} if are_random else set())
    advice = next(alert.advice[0] for alert in alerts if alert.kind == "dead_units")
    assert ("target" in advice) == are_random


def test_gradients_that_are_set_to_zero_are_no_vanishing_ones() -> None:
    model = layers()
    with zero_gradients(model, "0"):
        [alert] = classify(model, 60)
    assert (alert.kind, alert.severity, alert.module_name) == ("vanishing_gradient", "note", "0")
    assert "zero_gradients()" in alert.advice[0]


@pytest.mark.parametrize("with_biases", [False, True])
def test_weights_that_start_at_zero_are_the_cause(with_biases: bool) -> None:
    model = layers()
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

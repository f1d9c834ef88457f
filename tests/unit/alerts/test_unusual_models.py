"""Rules in models and loops that look odd and are right, or look right and are broken."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry.testing import capture_run
from tests.helpers.applied import Applied
from tests.helpers.rules import rule
from tests.helpers.small_runs import captured, toward


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


def mlp(*end: nn.Module, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, outputs), *end)


def test_a_unit_of_the_outputs_is_no_explosion() -> None:
    model = mlp(Applied(lambda self, x: 1e5 * x), outputs=1)  # converts it to that of the targets
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
    model = mlp()
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

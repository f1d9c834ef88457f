"""Usual models request no full step, and their faulty variants are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from telemetry.testing import CapturedRun, capture_run

STEPS, EVERY = 150, 100


class Blocks(nn.Module):
    """Residual blocks over tokens; some parameters start at zero or get no gradient.

    Args:
        gain: Initial scale of each branch.
        lets_through: Applied to the input of each branch and of its skip connection.
    """

    def __init__(
        self, *, gain: float = 1.0, lets_through: Callable[[Tensor], Tensor] = torch.clone
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 16)
        self.positions = nn.Parameter(torch.zeros(8, 16))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
            for _ in range(3)
        )
        self.gains = nn.Parameter(torch.full((3,), gain))
        self.head, self.lets_through = nn.Linear(16, 50), lets_through

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for gain, block in zip(self.gains, self.blocks, strict=True):
            x = self.lets_through(x) + gain * block(self.lets_through(x))
        y: Tensor = self.head(x)
        return y


class Experts(nn.Module):
    """Each token goes to one of four experts, of which the last is rarely chosen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.gate = nn.Embedding(50, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.gate.bias[3] = -2.0
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        gates = (self.gate(x) + torch.randn(4)).softmax(-1)
        chosen, y = gates.argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (mine := chosen == index).any():
                y[mine] = expert(x[mine]) * gates[mine][:, index : index + 1]
        z: Tensor = self.head(x + y)
        return z


def frozen(model: Blocks) -> Blocks:
    model.embed.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    return model


def trained(model: nn.Module) -> CapturedRun:
    """Train the model to predict each token's number plus one."""
    optimizer = Adam(model.parameters(), 3e-3)
    torch.manual_seed(1)
    with capture_run(model, every_n_steps=EVERY) as run:
        for _ in range(STEPS):
            tokens = torch.randint(0, 49, (8, 8))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten() + 1)
            loss.backward()
            run.log(loss=loss)
            optimizer.step()
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [Blocks(), Blocks(gain=0.0), frozen(Blocks()), Experts()],
    ids=["positions of zeros", "branches that start at zero", "frozen", "experts"],
)
def test_permanent_conditions_request_no_full_step_and_raise_no_alert(model: nn.Module) -> None:
    run = trained(model)
    assert [record.step for record in run.records if record.full] == [0, 100]
    assert run.alerts == []


@pytest.mark.slow
def test_a_part_without_gradient_is_found_between_two_due_steps() -> None:
    run = trained(Blocks(lets_through=Tensor.detach))
    assert [(alert.kind, alert.module_name) for alert in run.alerts][:1] == [
        ("vanishing_gradient", "embed")
    ]
    assert run.alerts[0].step < 30


@pytest.mark.slow
def test_gradients_that_nearly_vanish_are_found_between_two_due_steps() -> None:
    def shrinks(x: Tensor) -> Tensor:
        return x.detach() + 1e-3 * (x - x.detach())

    run = trained(Blocks(lets_through=shrinks))
    assert run.alerts[0].kind == "vanishing_gradient"
    assert run.alerts[0].step < EVERY

"""A gradient that is exactly zero behind working layers has vanished, unless it should be zero."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from telemetry.alerts.vanishing_gradient import VanishingGradient
from telemetry.testing import capture_run
from tests.helpers.figures import figures
from tests.helpers.small_runs import train


class TwoTowers(nn.Module):
    """Network with a tower for each half of the input; ``join`` combines their outputs.

    Args:
        join: Function of the outputs of both towers; a head classifies its result.
        swap: Whether the tower of interest runs behind the other one.
        wide: Units of the tower of interest.
    """

    def __init__(
        self, join: Callable[[Tensor, Tensor], Tensor], *, swap: bool = False, wide: int = 16
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(4, wide), nn.ReLU(), nn.Linear(wide, 16))
        self.other = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        self.head, self.join, self.swap = nn.Linear(32, 3), join, swap

    def forward(self, x: Tensor) -> Tensor:
        if self.swap:
            other, tower = self.other(x[:, 4:]), self.tower(x[:, :4])
        else:
            tower, other = self.tower(x[:, :4]), self.other(x[:, 4:])
        y: Tensor = self.head(self.join(tower, other))
        return y


def usual(tower: Tensor, other: Tensor) -> Tensor:
    return torch.cat([tower, other], 1).relu()


def detached(tower: Tensor, other: Tensor) -> Tensor:
    return usual(tower.detach(), other)


def multiplied_by_zero(tower: Tensor, other: Tensor) -> Tensor:
    return usual(0.0 * tower, other)


def underflown(tower: Tensor, other: Tensor) -> Tensor:
    for _ in range(12):
        tower = 1e-4 * tower
    return usual(tower, other)


@pytest.mark.parametrize(
    ("join", "swap"),
    [(detached, False), (detached, True), (multiplied_by_zero, False), (underflown, False)],
)
def test_a_gradient_that_is_cut_off_or_underflows_has_vanished(
    join: Callable[[Tensor, Tensor], Tensor], swap: bool
) -> None:
    [alert] = train(VanishingGradient(), 60, model=TwoTowers(join, swap=swap))
    assert (alert.module_name, alert.step) == ("tower.0", 21)  # at the second evaluation
    assert 22 in figures(alert.summary)
    assert "tower.0 to tower.2" in alert.summary


def test_layers_that_never_had_a_gradient_are_checked_before_the_next_due_step() -> None:
    [alert] = train(VanishingGradient(), 60, model=TwoTowers(multiplied_by_zero), every=1000)
    assert alert.step == 22


def frozen(model: TwoTowers) -> TwoTowers:
    model.tower.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "model",
    [
        TwoTowers(usual),
        frozen(TwoTowers(detached)),
        TwoTowers(multiplied_by_zero, swap=True),  # a term of the loss whose weight is zero
        TwoTowers(detached, swap=True, wide=2),  # an unused head
    ],
)
def test_gradients_that_should_be_zero_have_not_vanished(model: TwoTowers) -> None:
    assert train(VanishingGradient(), 60, model=model) == []


def test_gradients_of_parameters_without_an_optimizer_have_not_vanished() -> None:
    model = TwoTowers(usual)
    rest = [*model.other.parameters(), *model.head.parameters()]
    assert train(VanishingGradient(), 60, model=model, optimizer=SGD(rest, 0.1)) == []


def test_a_generator_whose_critic_is_trained_alone_at_first_has_not_vanished() -> None:
    torch.manual_seed(0)
    generator, critic = (
        nn.Linear(4, 2),
        nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)),
    )
    model = nn.ModuleList([generator, critic])
    optimizers = [SGD(part.parameters(), 0.01) for part in model]
    with capture_run(model, every_n_steps=10, rules=[VanishingGradient()]) as run:
        for step in range(80):
            made = generator(torch.randn(32, 4))
            optimizers[1].zero_grad()
            loss = (
                critic(made.detach()).exp().mean() + (-critic(torch.randn(32, 2) + 1)).exp().mean()
            )
            loss.backward()
            optimizers[1].step()
            if step >= 50:
                optimizers[0].zero_grad()
                (-critic(made)).exp().mean().backward()
                optimizers[0].step()
    assert run.alerts == []


def test_gradients_that_are_zero_in_phases_have_not_vanished() -> None:
    model, phase = TwoTowers(lambda tower, other: usual(phase[0] * tower, other)), [1.0]

    def alternate(step: int) -> None:
        phase[0] = float(step % 12 < 2)

    assert train(VanishingGradient(), 100, model=model, before=alternate) == []


@pytest.mark.slow
def test_the_alert_resolves_when_gradients_return_and_not_when_they_become_zero() -> None:
    factor = [1e-7]
    model = TwoTowers(lambda tower, other: usual(factor[0] * tower, other))

    def change(step: int) -> None:
        factor[0] = 1e-7 if step < 40 else 0.0 if step < 120 else 1.0

    alerts = train(VanishingGradient(), 200, model=model, before=change)
    assert [alert.stage for alert in alerts] == ["started", "resolved"]
    assert alerts[0].step < 40
    assert alerts[1].step > 120
    assert figures(alerts[1].summary)[-1] == alerts[0].step


def deep(*, normalized: bool) -> nn.Module:
    """Sixteen layers as PyTorch makes them, each of which shrinks gradients more than twofold."""
    torch.manual_seed(0)
    between = [nn.LayerNorm(32)] if normalized else []
    hidden = [part for _ in range(16) for part in (nn.Linear(32, 32), *between, nn.ReLU())]
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), *hidden, nn.Linear(32, 3))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_vanishing_gradients_are_reported_though_adam_moves_every_layer(every: int) -> None:
    model = deep(normalized=False)
    (alert, *_) = train(
        VanishingGradient(), 80, every=every, model=model, optimizer=Adam(model.parameters(), 1e-4)
    )
    assert alert.module_name == "0"
    assert "loss has not fallen" in (alert.cause or "")


@pytest.mark.slow
def test_a_deep_network_that_adam_trains_raises_no_alert() -> None:
    model = deep(normalized=True)
    optimizer = Adam(model.parameters(), 1e-4)
    assert train(VanishingGradient(), 80, model=model, optimizer=optimizer) == []


@pytest.mark.parametrize("rate", [0.0, 1e-7])
def test_a_learning_rate_of_zero_is_the_cause_of_a_missing_gradient(
    rate: float,
) -> None:
    """The second of two layers starts at 0, as in LoRA, and passes no gradient to the first."""
    tower = TwoTowers(usual)
    down, up = tower.tower[0], tower.tower[2]
    nn.init.zeros_(up.weight)
    up.weight.register_hook(
        lambda grad: grad * (rate == 0)
    )  # at the other rate its gradient is zero
    still = [*down.parameters(), *up.parameters()]
    moving = [*tower.other.parameters(), *tower.head.parameters()]
    groups = [{"params": moving}, {"params": still, "lr": rate}]
    [alert] = train(VanishingGradient(), 60, model=tower, optimizer=SGD(groups, 0.1), every=10)
    assert alert.module_name == "tower.0"
    assert figures(alert.cause) == ([0] if rate == 0 else [])

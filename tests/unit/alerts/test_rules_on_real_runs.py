"""Healthy runs on images of digits, with the layers that rules could take for a fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert
from tests.helpers.applied import Applied
from tests.helpers.interrupted_runs import Run, digits
from tests.helpers.small_runs import captured

IMAGES, LABELS = digits()


def train(
    model: nn.Module, *, steps: int = 120, lr: float = 0.05, unit: float = 1.0
) -> list[Alert]:
    """Return the alerts of all rules on a classifier; its loss is in this unit."""

    def loss_of(step: int) -> Tensor:
        batch = torch.randint(0, len(IMAGES), (32,))
        return unit * F.cross_entropy(model(IMAGES[batch]), LABELS[batch])

    optimizer = SGD(model.parameters(), lr / unit, 0.9)
    return captured(model, steps, rules=None, loss_of=loss_of, optimizer=optimizer).alerts


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-6, 1e6])
@pytest.mark.parametrize(
    ("activation", "gain"), [(nn.ReLU, 2**0.5), (nn.Tanh, 1.0), (nn.GELU, 2**0.5)]
)
def test_a_healthy_run_raises_no_alert_in_any_unit(
    activation: type[nn.Module], gain: float, unit: float
) -> None:
    assert train(Run(activation=activation, gain=gain).model(), unit=unit) == []


def squeeze_and_excite(*, as_convolutions: bool, stride: int) -> nn.Module:
    """Return a network whose maps are scaled by a gate, which is computed from their means."""
    torch.manual_seed(0)
    inner = (nn.Conv2d(16, 16, 1) if as_convolutions else nn.Linear(16, 16) for _ in range(2))
    shape = nn.Identity() if as_convolutions else nn.Flatten()
    squeeze, excite = inner
    # Most gates are open or closed for every image.
    excite.bias.data.copy_(torch.tensor([9.0, -9.0] * 7 + [0.0, 0.0]))
    gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), shape, squeeze, nn.ReLU(), excite, nn.Sigmoid())
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 8 if stride == 8 else 3, stride=stride),
        Applied(lambda self, x: x * self.gate(x).view(-1, 16, 1, 1), gate=gate),
        *(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(16, 10),
    )


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 8])  # maps of 6 x 6 pixels, and of one
@pytest.mark.parametrize("as_convolutions", [True, False])
def test_gates_that_are_open_or_closed_are_not_saturated(
    as_convolutions: bool, stride: int
) -> None:
    assert train(squeeze_and_excite(as_convolutions=as_convolutions, stride=stride), steps=40) == []


@pytest.mark.slow
def test_layers_before_a_recurrent_one_are_not_saturated() -> None:
    """Residual layers before an LSTM, whose outputs are bounded for any input, may be large."""

    def apply(self: Any, x: Tensor) -> Any:
        x = x.view(-1, 16, 4) * 4 - 2
        for residual in self.residuals:
            x = x + residual(x)
        return self.head(self.recurrent(x)[0].flatten(1))

    torch.manual_seed(0)
    residuals = nn.ModuleList(nn.Linear(4, 4) for _ in range(48))
    recurrent, head = nn.LSTM(4, 4, batch_first=True), nn.Linear(64, 10)
    model = Applied(apply, residuals=residuals, recurrent=recurrent, head=head)
    kinds = [alert.kind for alert in train(model, steps=41, lr=1e-2)]
    assert "saturated_units" not in kinds


def after_pooling() -> nn.Sequential:
    """Return a network whose hidden layer after pooling is no gate."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 48), nn.Sigmoid(), nn.Linear(48, 10)),
    )
    nn.init.constant_(model[5].bias, 12.0)
    return model


def test_a_closed_layer_after_pooling_is_saturated() -> None:
    alert, *_ = train(after_pooling(), steps=40)
    assert (alert.kind, alert.observed_in or alert.module_name) == ("saturated_units", "6")

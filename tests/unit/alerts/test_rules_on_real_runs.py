"""Each rule reports its fault in a small real run, and nothing in the run without the fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert, HookLogger
from tests.helpers.applied import Applied
from tests.helpers.captured import at_step

Train = Callable[..., list[Alert]]


def mlp(
    depth: int = 4, activation: type[nn.Module] = nn.ReLU, gain: float = 2**0.5, bias: float = 0.0
) -> nn.Sequential:
    """Return a network of layers of 48 units; ``bias`` is that of the second one."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width_in in [64] + [48] * (depth - 1):
        linear = nn.Linear(width_in, 48)
        nn.init.normal_(linear.weight, std=gain / width_in**0.5)
        nn.init.constant_(linear.bias, bias if len(layers) == 2 else 0.0)
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(48, 10))


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)


@pytest.fixture
def train(digits: tuple[Tensor, Tensor], tmp_path: Path) -> Train:
    def train(
        model: nn.Module,
        *,
        steps: int = 120,
        lr: float = 0.05,
        before: Callable[[int], None] = lambda step: None,
        weigh: Callable[[int], float] = lambda step: 1.0,
    ) -> list[Alert]:
        """Return the alerts that started; a flush after each step makes runs repeatable."""
        images, labels = digits
        optimizer = SGD(model.parameters(), lr, 0.9)
        torch.manual_seed(1)
        with HookLogger(model, tmp_path, every_n_steps=10, measure="!images") as logger:
            for step in range(steps):
                before(step)
                batch = torch.randint(0, len(images), (32,))
                loss = F.cross_entropy(model(images[batch]), labels[batch]) * weigh(step)
                logger.log(loss=loss)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                logger.flush()
            return [alert for alert in logger.alerts if alert.stage == "started"]

    return train


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize(
    ("activation", "gain"), [(nn.ReLU, 2**0.5), (nn.Tanh, 1.0), (nn.GELU, 2**0.5)]
)
def test_a_healthy_run_raises_no_alert_in_any_unit(
    train: Train, activation: type[nn.Module], gain: float, unit: float
) -> None:
    model = mlp(activation=activation, gain=gain)
    assert train(model, lr=0.05 / unit, weigh=lambda step: unit) == []


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
    train: Train, as_convolutions: bool, stride: int
) -> None:
    assert train(squeeze_and_excite(as_convolutions=as_convolutions, stride=stride), steps=40) == []


@pytest.mark.slow
def test_layers_before_a_recurrent_one_are_not_saturated(train: Train) -> None:
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


@pytest.mark.parametrize(
    ("model", "settings", "kinds"),
    [
        (mlp(4, nn.Tanh, gain=60.0), {}, {"saturated_units"}),
        (after_pooling(), {}, {"saturated_units"}),
        (mlp(), {"lr": 3.0}, {"loss_divergence", "dead_units"}),
        (mlp(), {"lr": 10.0}, {"loss_divergence", "dead_units"}),
        (mlp(), {"lr": 30.0}, {"loss_divergence", "dead_units"}),
    ],
)
def test_the_fault_is_the_first_alert(
    train: Train, model: nn.Module, settings: dict[str, Any], kinds: set[str]
) -> None:
    assert train(model, steps=40, **settings)[0].kind in kinds


LINEAR = {str(place) for place in range(0, 33, 2)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "kind", "modules", "latest"),
    [
        (mlp(16, gain=4.0), {"lr": 1e-4, "steps": 30}, "exploding_gradient", LINEAR, 2),
        (mlp(12, nn.Sigmoid, gain=1.0), {}, "vanishing_gradient", {"0", "2", "4"}, 120),
        (mlp(bias=-50.0), {}, "dead_units", {"2", "3"}, 120),
        (mlp(), {"lr": 1e-9, "steps": 160}, "no_learning", {None}, 160),
    ],
)
def test_the_fault_is_the_only_alert(
    train: Train,
    model: nn.Module,
    settings: dict[str, Any],
    kind: str,
    modules: set[str | None],
    latest: int,
) -> None:
    [alert] = train(model, **settings)
    assert alert.kind == kind
    assert alert.module_name in modules
    assert alert.step <= latest
    assert alert.advice
    assert alert.severity != "note"


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_weights_that_grow_during_training_explode(
    train: Train, activation: type[nn.Module]
) -> None:
    model = mlp(activation=activation)
    grow = at_step(60, lambda: model[4].weight.data.mul_(500))
    alerts = train(model, steps=75, before=grow)
    jumps = [alert for alert in alerts if alert.kind == "weight_jump"]
    assert {alert.module_name for alert in jumps} <= {"4"}
    first = next(alert for alert in alerts if alert not in jumps)
    assert first.kind == "exploding_gradient"
    assert first.step <= 63
    assert first.module_name in {"4", "5"}

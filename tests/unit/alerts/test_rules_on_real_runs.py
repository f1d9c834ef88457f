"""Each rule reports its fault in a small real run, and nothing in the run without the fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from telemetry import Alert, HookLogger
from tests.helpers.figures import figures


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)


def mlp(
    depth: int = 4, activation: type[nn.Module] = nn.ReLU, gain: float = 2**0.5
) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width_in in [64] + [48] * (depth - 1):
        linear = nn.Linear(width_in, 48)
        nn.init.normal_(linear.weight, std=gain / width_in**0.5)
        nn.init.zeros_(linear.bias)
        layers += [linear, activation()]
    return nn.Sequential(*layers, nn.Linear(48, 10))


def train(
    model: nn.Module,
    digits: tuple[Tensor, Tensor],
    log_dir: Path,
    *,
    steps: int = 120,
    lr: float = 0.05,
    loss_unit: float = 1.0,
    adam: bool = False,
    disturb: Callable[[int, Tensor], Tensor] | None = None,
    weigh: Callable[[int], float] = lambda step: 1.0,
    alerts: dict[str, dict[str, float] | None] | None = None,
) -> list[Alert]:
    """Return the alerts that started; a flush after each step makes runs repeatable."""
    images, labels = digits
    optimizer = (
        Adam(model.parameters(), lr) if adam else SGD(model.parameters(), lr / loss_unit, 0.9)
    )
    torch.manual_seed(1)
    with HookLogger(model, log_dir, every_n_steps=10, images=False, alerts=alerts) as logger:
        for step in range(steps):
            batch = torch.randint(0, len(images), (32,))
            inputs = images[batch] if disturb is None else disturb(step, images[batch])
            loss = F.cross_entropy(model(inputs), labels[batch]) * loss_unit * weigh(step)
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.flush()
        return [alert for alert in logger.alerts if alert.stage == "started"]


@pytest.mark.slow
@pytest.mark.parametrize("loss_unit", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh, nn.GELU])
def test_a_healthy_run_raises_no_alert_in_any_unit(
    digits: tuple[Tensor, Tensor],
    tmp_path: Path,
    activation: type[nn.Module],
    loss_unit: float,
) -> None:
    model = mlp(activation=activation, gain=1.0 if activation is nn.Tanh else 2**0.5)
    assert train(model, digits, tmp_path, loss_unit=loss_unit) == []


def test_weights_that_are_too_large_explode(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    [alert] = train(mlp(16, gain=4.0), digits, tmp_path, lr=1e-4, steps=30)
    assert alert.kind == "exploding_gradient"
    assert alert.module_name is not None
    assert alert.step <= 2


@pytest.mark.slow
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_weights_that_grow_during_training_explode(
    digits: tuple[Tensor, Tensor], tmp_path: Path, activation: type[nn.Module]
) -> None:
    model = mlp(activation=activation)

    def grow(step: int, inputs: Tensor) -> Tensor:
        if step == 60:
            with torch.no_grad():
                model[4].weight.mul_(500)
        return inputs

    alerts = train(model, digits, tmp_path, steps=75, disturb=grow)
    jumps = [alert for alert in alerts if alert.kind == "weight_jump"]
    assert {alert.module_name for alert in jumps} <= {"4"}
    first = next(alert for alert in alerts if alert not in jumps)
    assert first.kind == "exploding_gradient"
    assert first.step <= 63
    assert first.module_name in {"4", "5"}


@pytest.mark.slow
@pytest.mark.parametrize("weight", [300.0, 3000.0])
def test_another_weight_of_the_loss_is_a_note_and_not_an_explosion(
    digits: tuple[Tensor, Tensor], tmp_path: Path, weight: float
) -> None:
    def weigh(step: int) -> float:
        return weight if step >= 60 else 1.0

    alerts = train(mlp(), digits, tmp_path, steps=110, adam=True, lr=1e-3, weigh=weigh)
    assert [(alert.kind, alert.severity) for alert in alerts] == [("loss_spike", "note")]


@pytest.mark.slow
def test_gradients_of_a_deep_stack_of_sigmoids_vanish(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    alerts = train(mlp(12, nn.Sigmoid, gain=1.0), digits, tmp_path)
    assert [alert.kind for alert in alerts] == ["vanishing_gradient"]
    assert alerts[0].module_name in {"0", "2", "4"}


@pytest.mark.slow
@pytest.mark.parametrize("step", [30, 33])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_nonfinite_batch_is_attributed_to_the_inputs_at_a_full_step_only(
    digits: tuple[Tensor, Tensor], tmp_path: Path, step: int, value: float
) -> None:
    def break_one(at: int, inputs: Tensor) -> Tensor:
        if at == step:
            inputs[7] = value
        return inputs

    first = train(mlp(), digits, tmp_path, disturb=break_one)[0]
    assert (first.kind, first.step, first.severity) == ("nonfinite", step, "error")
    assert first.module_name == ("0" if step == 30 else None)
    assert ({64, 2048} <= {*figures(first.summary)}) == (step == 30)  # values of the batch


class Prepared(nn.Module):
    """Model with a function, not a module, between the batch and the first layer."""

    def __init__(self, prepare: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.prepare = prepare
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.prepare(x))
        return y


@pytest.mark.slow
def test_inputs_of_the_first_layer_are_distinguished_from_the_batch(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    def blank_one(step: int, inputs: Tensor) -> Tensor:
        if step == 30:
            inputs[7] = 0
        return inputs

    model = Prepared(lambda x: x / x.norm(dim=1, keepdim=True))
    first = train(model, digits, tmp_path, disturb=blank_one)[0]
    assert (first.kind, first.step, first.module_name) == ("nonfinite", 30, "layers.0")
    seen = "64 of 2,048 values of the input of layers.0"
    assert seen in first.summary


@pytest.mark.slow
def test_missing_values_that_the_model_fills_in_are_not_the_cause(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    model = Prepared(lambda x: x.nan_to_num(0.0))

    factor = torch.ones(())
    model.layers[4].register_forward_hook(lambda module, args, output: output * factor)

    def break_a_layer(step: int, inputs: Tensor) -> Tensor:
        inputs[3] = torch.nan
        factor.fill_(torch.inf if step == 30 else 1.0)
        return inputs

    first = train(model, digits, tmp_path, disturb=break_a_layer)[0]
    assert (first.kind, first.step, first.module_name) == ("nonfinite", 30, "layers.4")


@pytest.mark.slow
def test_a_layer_that_returns_only_zeros_is_dead(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    model = mlp()
    nn.init.constant_(model[2].bias, -50)
    [alert] = train(model, digits, tmp_path)
    assert alert.kind == "dead_units"
    assert alert.module_name in {"2", "3"}
    assert alert.advice


@pytest.mark.slow
def test_a_layer_on_the_flat_part_is_saturated(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    first = train(mlp(4, nn.Tanh, gain=60.0), digits, tmp_path)[0]
    assert first.kind == "saturated_units"


class SqueezeAndExcite(nn.Module):
    """Convolution whose maps are scaled by a gate, which is computed from their means."""

    def __init__(self, *, as_convolutions: bool, stride: int) -> None:
        super().__init__()
        self.inputs = nn.Conv2d(1, 16, 8 if stride == 8 else 3, stride=stride)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite = (
            nn.Conv2d(16, 16, 1) if as_convolutions else nn.Linear(16, 16) for _ in range(2)
        )
        self.relu, self.gate = nn.ReLU(), nn.Sigmoid()
        self.outputs = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inputs(x.view(-1, 1, 8, 8))
        pooled = self.pool(x)
        pooled = pooled if isinstance(self.excite, nn.Conv2d) else pooled.flatten(1)
        gate = self.gate(self.excite(self.relu(self.squeeze(pooled))))
        scaled = x * gate.view(-1, 16, 1, 1)
        y: Tensor = self.head(self.outputs(scaled).relu().mean((2, 3)))
        return y


@pytest.mark.slow
@pytest.mark.parametrize("stride", [1, 8])  # maps of 6 x 6 pixels, and of one
@pytest.mark.parametrize("as_convolutions", [True, False])
def test_gates_that_are_open_or_closed_are_not_saturated(
    digits: tuple[Tensor, Tensor], tmp_path: Path, as_convolutions: bool, stride: int
) -> None:
    torch.manual_seed(0)
    model = SqueezeAndExcite(as_convolutions=as_convolutions, stride=stride)
    with torch.no_grad():  # most gates are open or closed for every image
        model.excite.bias.copy_(torch.tensor([9.0, -9.0] * 7 + [0.0, 0.0]))
    assert train(model, digits, tmp_path, steps=40) == []


def test_a_hidden_layer_after_pooling_is_no_gate(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 48),
        nn.Sigmoid(),
        nn.Linear(48, 10),
    )
    nn.init.constant_(model[5].bias, 12.0)
    first = train(model, digits, tmp_path, steps=40)[0]
    assert (first.kind, first.module_name) == ("saturated_units", "6")


class ResidualsBeforeRecurrence(nn.Module):
    """Residual layers before an LSTM, whose outputs are bounded for any input."""

    def __init__(self) -> None:
        super().__init__()
        self.residuals = nn.ModuleList(nn.Linear(4, 4) for _ in range(48))
        self.recurrent = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        for residual in self.residuals:
            x = x + residual(x)
        y: Tensor = self.recurrent(x)[0]
        return y


@pytest.mark.slow
def test_layers_before_a_recurrent_one_are_not_saturated(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ResidualsBeforeRecurrence()
    optimizer = SGD(model.parameters(), 1e-2)
    with HookLogger(model, tmp_path, every_n_steps=1, images=False) as logger:
        for _ in range(41):
            loss = model(torch.randn(4, 3, 4)).square().mean()
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert [alert for alert in logger.alerts if alert.kind == "saturated_units"] == []


@pytest.mark.parametrize("lr", [3.0, 10.0, 30.0])
def test_a_learning_rate_that_is_far_too_high_diverges(
    digits: tuple[Tensor, Tensor], tmp_path: Path, lr: float
) -> None:
    kinds = [alert.kind for alert in train(mlp(), digits, tmp_path, lr=lr, steps=40)]
    assert kinds[0] in {"loss_divergence", "dead_units"}


@pytest.mark.slow
def test_a_tiny_learning_rate_raises_no_learning(
    digits: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    [alert] = train(mlp(), digits, tmp_path, lr=1e-9, steps=160)
    assert alert.kind == "no_learning"


@pytest.mark.slow
def test_a_rule_set_to_none_reports_nothing(digits: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    alerts = train(mlp(), digits, tmp_path, lr=1e-9, steps=160, alerts={"no_learning": None})
    assert alerts == []


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"dead_unit": None}, ValueError, "no rule has this name; .*dead_units"),
        ({"dead_units": {"fractoin": 0.5}}, ValueError, "no parameter has this name; .*fraction"),
        ({"dead_units": {"fraction": "half"}}, TypeError, "must be a number"),
        ({"dead_units": {"fraction": 0}}, ValueError, "must be above 0"),
        ({"dead_units": {"fraction": 8}}, ValueError, "'fraction': 8.*must be at most 1"),
        ({"vanishing_gradient": {"zero_share": 1.1}}, ValueError, "zero_share.*must be at most 1"),
        ({"dead_units": {"severity": "fatal"}}, ValueError, "must be one of note, warning, error"),
        ({"dead_units": 0.5}, TypeError, "must be a dict of parameters, a Detector"),
    ],
)
def test_the_logger_refuses_an_invalid_configuration(
    tmp_path: Path, config: dict[str, object], error: type[Exception], message: str
) -> None:
    model = mlp()
    with pytest.raises(error, match=message):
        HookLogger(model, tmp_path, alerts=config)  # type: ignore[arg-type]

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert
from telemetry.alerts.mistakes import TargetsBroadcast, WrongLossInput
from telemetry.testing import capture_run
from tests.helpers.figures import figures

Loss = Callable[[Tensor, Tensor], Tensor]


class EndsWith(nn.Sequential):
    """Layers, and a function of their output."""

    def __init__(self, function: Callable[[Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(super().forward(x))


def run(
    last: nn.Module | Callable[[Tensor], Tensor],
    loss_function: Loss,
    *,
    classes: int = 10,
    every: int = 10,
    micro_batches: int = 1,
    rate: float = 0.1,
    rows: int = 32,
) -> list[Alert]:
    """Train for 100 steps; with one class, the target of each row is 0 or 1."""
    torch.manual_seed(0)
    layers = nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, classes)
    is_module = isinstance(last, nn.Module)
    model = nn.Sequential(*layers, last) if is_module else EndsWith(last, *layers)
    optimizer = SGD(model.parameters(), rate, 0.9)
    rules = [WrongLossInput(), TargetsBroadcast()]
    with capture_run(model, every_n_steps=every, rules=rules) as recorded:
        for _ in range(100):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                x = torch.randn(rows, 16)
                y = x[:, :classes].argmax(1) if classes > 1 else (x[:, :1] > 0.3).float()
                loss = loss_function(model(x), y)
                (loss / micro_batches).backward()
            recorded.log(loss=loss)
            optimizer.step()
    return recorded.alerts


def cross_entropy_of_most(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits, classes.masked_fill(torch.arange(len(classes)) % 4 == 0, -100))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(
    ("loss_function", "classes", "rate", "micro_batches"),
    [
        (F.cross_entropy, 10, 0.1, 1),
        (F.cross_entropy, 2, 0.1, 1),
        (F.cross_entropy, 10, 0.1, 4),
        (cross_entropy_of_most, 10, 0.1, 1),
        (nn.CrossEntropyLoss(reduction="sum"), 10, 0.003, 1),
    ],
)
def test_a_softmax_before_a_cross_entropy_is_named(
    loss_function: Loss, classes: int, rate: float, micro_batches: int, every: int
) -> None:
    (alert,) = run(
        nn.Softmax(1), loss_function,
        classes=classes, rate=rate, micro_batches=micro_batches, every=every,
    )  # fmt: skip
    assert (alert.severity, alert.module_name) == ("warning", "3")
    assert 20 < alert.step < 40
    lowest = float(F.cross_entropy(torch.eye(classes), torch.arange(classes)))
    assert float(f"{lowest:.3g}") in figures(alert.summary)


def test_a_sigmoid_before_a_loss_with_logits_is_named() -> None:
    (alert,) = run(nn.Sigmoid(), F.binary_cross_entropy_with_logits, classes=1)
    assert alert.module_name == "3"
    assert 0.313 in figures(alert.summary)


@pytest.mark.parametrize(
    ("last", "bounds"),
    [
        (nn.ReLU(), [0]),
        (nn.Tanh(), [1, 1]),  # -1 and 1
        (nn.Sigmoid(), [0, 1]),
    ],
)
def test_other_activations_before_a_cross_entropy_are_named(
    last: nn.Module, bounds: list[float]
) -> None:
    (alert,) = run(last, F.cross_entropy)
    assert (alert.kind, alert.module_name) == ("wrong_loss_input", "3")
    assert figures(alert.summary)[1:] == bounds


@pytest.mark.parametrize(
    ("last", "loss_function", "classes"),
    [
        (lambda x: F.softmax(x, 1), F.cross_entropy, 10),
        (torch.sigmoid, F.binary_cross_entropy_with_logits, 1),
        (torch.relu, F.cross_entropy, 10),
        (torch.tanh, F.cross_entropy, 10),
    ],
)
def test_a_function_at_the_end_of_the_model_is_judged_like_its_module(
    last: Callable[[Tensor], Tensor], loss_function: Loss, classes: int
) -> None:
    (alert,) = run(last, loss_function, classes=classes)
    assert (alert.kind, alert.module_name) == ("wrong_loss_input", "")


def test_a_function_before_its_own_loss_is_right() -> None:
    assert run(torch.sigmoid, F.binary_cross_entropy, classes=1) == []


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("loss_function", [F.cross_entropy, lambda p, y: F.nll_loss(p.log(), y)])
def test_a_softmax_over_the_batch_is_named(loss_function: Loss, micro_batches: int) -> None:
    (alert,) = run(nn.Softmax(0), loss_function, micro_batches=micro_batches)
    assert (alert.kind, alert.severity, alert.module_name) == ("wrong_loss_input", "note", "3")
    assert "over the batch" in alert.summary


def divergence(p: Tensor, classes: Tensor) -> Tensor:
    return F.kl_div(p, 0.9 * F.one_hot(classes, 10) + 0.01, reduction="batchmean")


@pytest.mark.slow
@pytest.mark.parametrize("loss_function", [F.nll_loss, divergence])
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_probabilities_in_the_place_of_their_logarithms_are_named(
    loss_function: Loss, micro_batches: int
) -> None:
    (alert,) = run(nn.Softmax(1), loss_function, micro_batches=micro_batches)
    assert (alert.kind, alert.severity, alert.module_name) == ("wrong_loss_input", "note", "3")
    assert "logarithms" in alert.summary


def test_a_square_batch_is_not_a_softmax_over_the_batch() -> None:
    assert run(nn.Softmax(1), lambda p, y: F.nll_loss(p.log(), y), rows=10) == []


def squared(p: Tensor, classes: Tensor) -> Tensor:
    return (p - F.one_hot(classes, p.shape[1])).square().sum(1).mean()


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-4, 0.1])
@pytest.mark.parametrize(
    ("last", "loss_function", "classes"),
    [
        (nn.Softmax(1), lambda p, y: F.nll_loss(p.log(), y), 10),
        (nn.Softmax(1), squared, 10),
        (nn.Softmax(1), lambda p, y: squared(p, y) / 2, 10),
        (nn.Identity(), F.cross_entropy, 10),
        (nn.LogSoftmax(1), F.cross_entropy, 10),
        (nn.LogSoftmax(1), F.nll_loss, 10),
        (nn.Softmax(1), lambda p, y: divergence(p.log(), y), 10),
        (nn.Sigmoid(), F.binary_cross_entropy, 1),
        (nn.Sigmoid(), F.mse_loss, 1),
        (nn.ReLU(), lambda p, y: F.mse_loss(p, F.one_hot(y, 10).float()), 10),
        (nn.Tanh(), lambda p, y: F.mse_loss(p, F.one_hot(y, 10).float()), 10),
        (nn.Sigmoid(), lambda p, y: F.binary_cross_entropy(p, F.one_hot(y, 10).float()), 10),
        (nn.Sigmoid(), lambda p, y: -(p - p.mean(1, keepdim=True)).square().mean(), 10),
        (nn.Sigmoid(), lambda p, y: F.mse_loss(p, y) / 2, 1),
        (nn.Identity(), F.mse_loss, 1),
        (nn.Identity(), lambda p, y: F.mse_loss(p[:, 0], y[:, 0]), 1),
        (nn.Identity(), lambda p, y: (p - 1).square().mean(), 1),  # as in a GAN
        (nn.Sigmoid(), F.l1_loss, 1),
    ],
)
def test_other_losses_are_not_reported(
    last: nn.Module, loss_function: Loss, classes: int, rate: float
) -> None:
    assert run(last, loss_function, classes=classes, rate=rate) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss_function", "rate"),
    [
        (lambda p, y: (p - y[:, 0]).square().mean(), 0.1),
        (lambda p, y: (p - y[:, 0]).square().mean() / 2, 0.1),
        (lambda p, y: (p - y[:, 0]).square().sum(), 1e-4),
        (lambda p, y: (p[:, 0] - y).square().mean(), 0.1),
    ],
)
@pytest.mark.parametrize("every", [1, 10])
def test_outputs_and_targets_that_broadcast_are_named(
    loss_function: Loss, rate: float, every: int
) -> None:
    (alert,) = run(nn.Identity(), loss_function, classes=1, rate=rate, every=every)
    assert (alert.kind, alert.severity) == ("targets_broadcast", "note")
    assert figures(alert.cause) == [32, 1, 32, 32, 32]  # outputs, targets, their broadcast

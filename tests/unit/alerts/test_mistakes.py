"""Mistakes in a loop: evaluation mode, a loss of other inputs than it expects, repeated batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from telemetry import Alert
from tests.helpers.figures import figures
from tests.helpers.rules import rule
from tests.helpers.small_runs import Batch, EndsWith, Loss, draw, net, train

# --- evaluation mode -----------------------------------------------------------------------------


def test_a_model_left_in_evaluation_mode_is_noted_until_it_trains_again() -> None:
    model = net()

    def switch(step: int) -> None:
        if step in (15, 60):
            model.train(step == 60)

    begin, end = train(rule("eval_mode"), 70, model=model, before=switch)
    assert (begin.severity, begin.step, begin.stage) == ("warning", 34, "started")
    assert "Dropout" in begin.summary
    assert (end.severity, end.step, end.stage) == ("warning", 60, "resolved")


def test_neither_validation_nor_a_module_nor_a_model_without_modes_is_noted() -> None:
    model, part = net(), net()

    def validate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(2, 8))
        model.train()

    assert train(rule("eval_mode"), 60, model=model, before=validate) == []
    part[2].eval()
    assert train(rule("eval_mode"), 60, model=part) == []
    same = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    assert train(rule("eval_mode"), 60, model=same) == []


def with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 3)
    )


def test_only_new_batch_norms_that_evaluate_from_the_start_are_noted() -> None:
    new, trained = with_norms(), with_norms()
    assert train(rule("eval_mode"), 30, model=trained) == []
    for model in (new, trained):
        model[1].eval()
        model[3].eval()
    assert train(rule("eval_mode"), 30, model=trained) == []
    [note] = train(rule("eval_mode"), 60, model=new)
    assert (note.severity, note.step, note.module_name) == ("note", 0, "1")
    assert figures(note.summary)[:2] == [2, 2]


def test_batch_norms_that_train_on_nearly_constant_batches_are_not_noted() -> None:
    for size in (0.0, 1e-3):
        batch = size * torch.randn(16, 8), torch.arange(16) % 3
        assert train(rule("eval_mode"), 3, model=with_norms(), batch=lambda _, b=batch: b) == []


# --- the loss ------------------------------------------------------------------------------------

Last = nn.Module | Callable[[Tensor], Tensor]


def run(
    last: Last,
    loss_function: Loss,
    classes: int = 10,
    *,
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

    def batch(step: int) -> Batch:
        x = torch.randn(rows, 16)
        return x, x[:, :classes].argmax(1) if classes > 1 else (x[:, :1] > 0.3).float()

    return train(
        rule("wrong_loss_input"), 100,
        model=model, optimizer=partial(SGD, lr=rate, momentum=0.9), batch=batch,
        loss_function=loss_function, micro_batches=micro_batches, every=every,
    )  # fmt: skip


def nll_of_logarithms(p: Tensor, classes: Tensor) -> Tensor:
    return F.nll_loss(p.log(), classes)


def cross_entropy_of_most(logits: Tensor, classes: Tensor) -> Tensor:
    return F.cross_entropy(logits, classes.masked_fill(torch.arange(len(classes)) % 4 == 0, -100))


def divergence(p: Tensor, classes: Tensor) -> Tensor:
    return F.kl_div(p, 0.9 * F.one_hot(classes, 10) + 0.01, reduction="batchmean")


def squared(p: Tensor, classes: Tensor) -> Tensor:
    return (p - F.one_hot(classes, p.shape[1])).square().sum(1).mean()


def of_classes(loss: Loss) -> Loss:
    return lambda p, classes: loss(p, F.one_hot(classes, p.shape[1]).float())


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
    [alert] = run(
        nn.Softmax(1), loss_function, classes, rate=rate, micro_batches=micro_batches, every=every
    )
    assert (alert.severity, alert.module_name) == ("warning", "3")
    assert 20 < alert.step < 40
    lowest = float(F.cross_entropy(torch.eye(classes), torch.arange(classes)))
    assert float(f"{lowest:.3g}") in figures(alert.summary)


@pytest.mark.parametrize(
    ("last", "loss_function", "classes", "numbers"),
    [
        (nn.Sigmoid(), F.binary_cross_entropy_with_logits, 1, {0.313}),
        (nn.ReLU(), F.cross_entropy, 10, {0}),
        (nn.Tanh(), F.cross_entropy, 10, {1}),  # -1 and 1
        (nn.Sigmoid(), F.cross_entropy, 10, {0, 1}),
        (lambda x: F.softmax(x, 1), F.cross_entropy, 10, set()),
        (torch.sigmoid, F.binary_cross_entropy_with_logits, 1, {0.313}),
        (torch.relu, F.cross_entropy, 10, {0}),
        (torch.tanh, F.cross_entropy, 10, {1}),
    ],
)
def test_other_activations_are_named_and_a_function_like_its_module(
    last: Last, loss_function: Loss, classes: int, numbers: set[float]
) -> None:
    [alert] = run(last, loss_function, classes)
    name = "3" if isinstance(last, nn.Module) else ""
    assert (alert.kind, alert.module_name) == ("wrong_loss_input", name)
    assert numbers <= {*figures(alert.summary)}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("dim", "loss_function", "mistake"),
    [
        (0, F.cross_entropy, "over the batch"),
        (0, nll_of_logarithms, "over the batch"),
        (1, F.nll_loss, "logarithms"),
        (1, divergence, "logarithms"),
    ],
)
def test_a_softmax_over_the_batch_and_a_missing_logarithm_are_named(
    dim: int, loss_function: Loss, mistake: str, micro_batches: int
) -> None:
    [alert] = run(nn.Softmax(dim), loss_function, micro_batches=micro_batches)
    assert (alert.kind, alert.severity, alert.module_name) == ("wrong_loss_input", "note", "3")
    assert mistake in alert.summary


def test_a_square_batch_is_not_a_softmax_over_the_batch() -> None:
    assert run(nn.Softmax(1), nll_of_logarithms, rows=10) == []


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1e-4, 0.1])
@pytest.mark.parametrize(
    ("last", "loss_function", "classes"),
    [
        (nn.Softmax(1), nll_of_logarithms, 10),
        (nn.Softmax(1), squared, 10),
        (nn.Softmax(1), lambda p, y: squared(p, y) / 2, 10),
        (nn.Identity(), F.cross_entropy, 10),
        (nn.LogSoftmax(1), F.cross_entropy, 10),
        (nn.LogSoftmax(1), F.nll_loss, 10),
        (nn.Softmax(1), lambda p, y: divergence(p.log(), y), 10),
        (nn.Sigmoid(), F.binary_cross_entropy, 1),
        (torch.sigmoid, F.binary_cross_entropy, 1),
        (nn.Sigmoid(), F.mse_loss, 1),
        (nn.ReLU(), of_classes(F.mse_loss), 10),
        (nn.Tanh(), of_classes(F.mse_loss), 10),
        (nn.Sigmoid(), of_classes(F.binary_cross_entropy), 10),
        (nn.Sigmoid(), lambda p, y: -(p - p.mean(1, keepdim=True)).square().mean(), 10),
        (nn.Sigmoid(), lambda p, y: F.mse_loss(p, y) / 2, 1),
        (nn.Identity(), F.mse_loss, 1),
        (nn.Identity(), lambda p, y: F.mse_loss(p[:, 0], y[:, 0]), 1),
        (nn.Identity(), lambda p, y: (p - 1).square().mean(), 1),  # as in a GAN
        (nn.Sigmoid(), F.l1_loss, 1),
    ],
)
def test_other_losses_are_not_reported(
    last: Last, loss_function: Loss, classes: int, rate: float
) -> None:
    assert run(last, loss_function, classes, rate=rate) == []


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
    [alert] = run(nn.Identity(), loss_function, classes=1, rate=rate, every=every)
    assert (alert.kind, alert.severity) == ("wrong_loss_input", "warning")
    assert figures(alert.cause) == [32, 1, 32, 32, 32]  # outputs, targets, their broadcast


# --- the same batch at each step -----------------------------------------------------------------


def found(steps: int = 230, **settings: Any) -> list[Alert]:
    return train(rule("same_batch"), steps, **settings)


def noisy() -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 3))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 10, 100])
def test_one_batch_at_every_step_is_noted_once(every: int) -> None:
    only = draw()
    [alert] = found(batch=lambda step: only, every=every)
    assert alert.severity == "note"
    assert 100 <= alert.step <= 120


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 5, 10])
def test_a_loader_that_repeats_its_batches_in_order_is_not_noted(period: int) -> None:
    epoch = [draw() for _ in range(period)]
    assert found(batch=lambda step: epoch[step % period]) == []


def test_the_same_tokens_are_noted_and_other_tokens_are_not() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), nn.Flatten(), nn.Linear(24, 3))
    tokens, classes = torch.randint(9, (4, 3)), torch.randint(3, (4,))
    [alert] = found(130, model=model, batch=lambda step: (tokens, classes))
    assert alert.step <= 120
    assert found(130, model=model, batch=lambda s: (torch.randint(9, (4, 3)), classes)) == []


@pytest.mark.slow
def test_a_data_set_of_one_batch_is_not_noted_until_it_is_memorized() -> None:
    only, slow = draw(), net()
    assert found(model=noisy(), batch=lambda step: only) == []
    optimizer = SGD(slow.parameters(), 0.03, 0.9)  # the loss shows it after step 150
    [alert] = found(400, model=slow, optimizer=optimizer, batch=lambda step: only, every=150)
    assert 150 < alert.step < 300


@pytest.mark.slow
@pytest.mark.parametrize("every", [10, 100])
def test_a_loader_that_gets_stuck_is_noted_for_any_loss(every: int) -> None:
    last = draw()
    [alert] = found(
        400, model=noisy(), batch=lambda step: draw() if step < 83 else last, every=every
    )
    assert alert.step <= 300

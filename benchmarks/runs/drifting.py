"""Runs that go wrong at a rate, in parts or for a few batches, each with a healthy twin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

from runs.models import Experts, Text, chain, letters
from runs.training import Log, batches, digits, fit, generator, mlp, run


def _text(log: Log, model: nn.Module, optimizer: Optimizer, steps: int, sign: float = 1.0) -> None:
    g = generator(log)

    def loss() -> Tensor:
        given = letters(g)
        logits = model(given[:, :-1])
        return sign * F.cross_entropy(logits.flatten(0, 1), given[:, 1:].flatten())

    fit(log, model, optimizer, loss, steps)


@run
def text_ok(log: Log) -> None:
    model = Text()
    _text(log, model, AdamW(model.parameters(), 1e-3), 300)


@run
def text_loss_negated(log: Log) -> None:
    model = Text()
    _text(log, model, AdamW(model.parameters(), 3e-4), 300, sign=-1.0)


@run
def text_decay_x1000(log: Log) -> None:
    model = Text()
    _text(log, model, AdamW(model.parameters(), 1e-3, weight_decay=30.0), 300)


@run
def logits_into_nll(log: Log) -> None:
    model, data = mlp(64, 64, 64, 10), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.nll_loss(model(images.flatten(1)), classes)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 250)


def _decayed(log: Log, factor: float) -> None:
    model, data = mlp(64, 64, 64, 10), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        size = sum((p**2).sum() for p in model.parameters() if p.dim() > 1)
        return F.cross_entropy(model(images.flatten(1)), classes) + factor * size

    fit(log, model, SGD(model.parameters(), 0.05, 0.9), loss, 300)


@run
def decay_in_loss(log: Log) -> None:
    _decayed(log, 1e-3)


@run
def decay_in_loss_of_wrong_sign(log: Log) -> None:
    _decayed(log, -1e-2)


def _modular(log: Log, decay: float, steps: int) -> None:
    g = generator(log)
    pairs = torch.cartesian_prod(torch.arange(31), torch.arange(31))
    pairs = pairs[torch.randperm(len(pairs), generator=g)[:400]]
    tables = nn.Embedding(31, 64)
    model = nn.Sequential(tables, nn.Flatten(), mlp(128, 128, 31))
    data = batches(log, 128, pairs)

    def loss() -> Tensor:
        (given,) = next(data)
        return F.cross_entropy(model(given), given.sum(1) % 31)

    fit(log, model, AdamW(model.parameters(), 3e-3, weight_decay=decay), loss, steps)


@run
def strong_decay_of_grokking(log: Log) -> None:
    _modular(log, 1.0, 600)


@run
def decay_far_too_strong(log: Log) -> None:
    _modular(log, 20.0, 300)


def _rates(log: Log, factor: Callable[[int], float]) -> None:
    model, data = mlp(64, 64, 64, 10), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images.flatten(1)), classes)

    fit(log, model, SGD(model.parameters(), 0.02), loss, 400, schedule=factor)


@run
def rate_decays(log: Log) -> None:
    _rates(log, lambda step: 0.9 ** (step // 20))


@run
def rate_decay_inverted(log: Log) -> None:
    _rates(log, lambda step: 0.75 ** -(step // 20))


@run
def rate_warms_up_by_a_factor(log: Log) -> None:
    _rates(log, lambda step: 1e-3 ** (1 - step / 100) if step < 100 else 0.99 ** (step - 100))


def _values(log: Log, discount: float) -> None:
    g = generator(log)
    model = mlp(8, 64, 64, 1)

    def loss() -> Tensor:
        state, reward, following = chain(g)
        with torch.no_grad():
            wanted = reward + discount * model(following)[:, 0]
        return F.mse_loss(model(state)[:, 0], wanted)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 500)


@run
def values_discounted(log: Log) -> None:
    _values(log, 0.95)


@run
def values_discount_above_one(log: Log) -> None:
    _values(log, 1.1)


def _fine_tuned(log: Log, decay: float) -> None:
    model, data = mlp(64, *[64] * 7, 10, activation=nn.GELU), batches(log, 32, *digits())
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    groups = [
        {"params": [*layer.parameters()], "lr": 2e-3 * decay**depth}
        for depth, layer in enumerate(reversed(layers))
    ]

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images.flatten(1)), classes)

    fit(log, model, AdamW(groups), loss, 300)


@run
def rates_fall_by_layer(log: Log) -> None:
    _fine_tuned(log, 0.65)


@run
def rates_vanish_by_layer(log: Log) -> None:
    _fine_tuned(log, 0.05)


def _second_stage(log: Log, *, freeze: bool) -> None:
    trunk, head = mlp(64, 64, 64, activation=nn.GELU), nn.Linear(64, 10)
    model, data = nn.Sequential(trunk, head), batches(log, 32, *digits())
    optimizer: Optimizer = Adam(model.parameters(), 1e-3)
    logger = log.attach(model)
    for step in range(400):
        if step == 137:
            trunk.requires_grad_(not freeze)
            optimizer = Adam(head.parameters(), 1e-3)
        images, classes = next(data)
        model.zero_grad()
        loss = F.cross_entropy(model(images.flatten(1)), classes)
        loss.backward()
        logger.log(loss=loss.item())
        log.losses.append(loss.item())
        optimizer.step()


@run
def second_stage_freezes_trunk(log: Log) -> None:
    _second_stage(log, freeze=True)


@run
def optimizer_rebuilt_without_trunk(log: Log) -> None:
    _second_stage(log, freeze=False)


def _routed(log: Log, *, weighted: bool, balanced: bool = False) -> None:
    model, data = Experts(weighted=weighted), batches(log, 64, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        error = F.cross_entropy(model(images.flatten(1)), classes)
        return error + 0.1 * model.balance if balanced else error

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 300)


@run
def router_learns(log: Log) -> None:
    _routed(log, weighted=True, balanced=True)


@run
def router_without_balance(log: Log) -> None:
    _routed(log, weighted=True)


@run
def router_behind_argmax(log: Log) -> None:
    _routed(log, weighted=False)


def _siamese(log: Log, *, apart: bool) -> None:
    g, data = generator(log), batches(log, 64, *digits())
    model = mlp(64, 128, 64, 32)

    def loss() -> Tensor:
        images = next(data)[0].flatten(1)
        a, b = (model(images + 0.5 * torch.randn(images.shape, generator=g)) for _ in range(2))
        spread = F.relu(1 - a.std(0)).mean() + F.relu(1 - b.std(0)).mean()
        return F.mse_loss(a, b) + (spread if apart else 0.0)

    fit(log, model, Adam(model.parameters(), 1e-3), loss, 400)


@run
def siamese_kept_apart(log: Log) -> None:
    _siamese(log, apart=True)


@run
def siamese_collapses(log: Log) -> None:
    _siamese(log, apart=False)


def _pictures(log: Log, *, train_norms: bool) -> None:
    model, data = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout2d(0.1),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10),
    ), batches(log, 32, *digits())  # fmt: skip
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.train(train_norms)

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    fit(log, model, SGD(model.parameters(), 0.02, 0.9), loss, 250)


@run
def batch_norms_train(log: Log) -> None:
    _pictures(log, train_norms=True)


@run
def batch_norms_in_eval_from_start(log: Log) -> None:
    _pictures(log, train_norms=False)


def _other_data(log: Log, is_other: Callable[[int], bool]) -> None:
    g, drawn = generator(log), iter(range(10**6))
    model, data = mlp(64, 128, 10), batches(log, 32, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        if is_other(next(drawn)):
            images = 2 * torch.randn(images.shape, generator=g)
        return F.cross_entropy(model(images.flatten(1)), classes)

    fit(log, model, SGD(model.parameters(), 0.02), loss, 350)


@run
def hard_batch_every_40(log: Log) -> None:
    _other_data(log, lambda step: step % 40 == 39)


@run
def garbage_for_ten_batches(log: Log) -> None:
    _other_data(log, lambda step: 173 <= step < 183)

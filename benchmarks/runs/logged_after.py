"""Runs that log the loss after the optimizer's step, as many loops do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from runs.training import Log, batches, digits, fit, generator, mlp, run


@run
def classes_join(log: Log) -> None:
    (images, classes), g = digits(), generator(log)
    model, steps = nn.Sequential(nn.Flatten(), *mlp(64, 100, 6)), iter(range(600))

    def loss() -> Tensor:
        stage = next(steps) // 200
        new = (classes // 2 == stage).nonzero()[:, 0]
        known = (classes < 2 * stage + 2).nonzero()[:, 0]
        parts = [some[torch.randint(len(some), (32,), generator=g)] for some in (new, known)]
        chosen = torch.cat(parts)
        return F.cross_entropy(model(images[chosen]), classes[chosen])

    fit(log, model, SGD(model.parameters(), 0.05, momentum=0.9), loss, 600, logs_after=True)


@run
def copying_from_further_back(log: Log) -> None:
    class Copier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.gru = nn.Embedding(11, 32), nn.GRU(32, 64, batch_first=True)
            self.head = nn.Linear(64, 10)

        def forward(self, tokens: Tensor) -> Tensor:
            logits: Tensor = self.head(self.gru(self.embed(tokens))[0])
            return logits

    g, model, steps = generator(log), Copier(), iter(range(600))

    def loss() -> Tensor:
        back = 1 + next(steps) // 150
        tokens = torch.randint(10, (32, 14), generator=g)
        logits = model(tokens)[:, back:]
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, :-back].flatten())

    optimizer = Adam(model.parameters(), 4e-3)
    fit(log, model, optimizer, loss, 600, clip=1.0, logs_after=True)


@run
def series_with_another_period(log: Log) -> None:
    g, model, steps = generator(log), mlp(48, 64, 12), iter(range(600))
    times = torch.arange(60.0)

    def loss() -> Tensor:
        period = 12 if next(steps) < 300 else 14
        phase = 2 * torch.pi * torch.rand(64, 1, generator=g)
        drift, noise = torch.randn(64, 1, generator=g), torch.randn(64, 60, generator=g)
        series = drift * times + 50 * (2 * torch.pi * times / period + phase).sin() + 5 * noise
        given, wanted = series[:, :48], series[:, 48:]
        mean, scale = given.mean(1, keepdim=True), given.std(1, keepdim=True)
        return F.l1_loss(model((given - mean) / scale) * scale + mean, wanted)

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 600, logs_after=True)


@run
def weak_signal(log: Log) -> None:
    g, model = generator(log), nn.Linear(20, 1)
    nn.init.zeros_(model.weight)
    truth = 0.03 * torch.randn(20, generator=g)

    def loss() -> Tensor:
        given = torch.randn(128, 20, generator=g)
        wanted = given @ truth + torch.randn(128, generator=g)
        return F.mse_loss(model(given)[:, 0], wanted)

    fit(log, model, SGD(model.parameters(), 0.02), loss, 500, logs_after=True)


@run
def rate_jumps_for_ten_steps(log: Log) -> None:
    data, model = batches(log, 64, *digits()), nn.Sequential(nn.Flatten(), *mlp(64, 64, 64, 10))
    optimizer = SGD(model.parameters(), 0.05, momentum=0.9)

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    def set_rate(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 5.0 if 205 <= step < 215 else 0.05

    fit(log, model, optimizer, loss, 300, before=set_rate, logs_after=True)

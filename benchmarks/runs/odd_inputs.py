"""Inputs that a model cannot use, with twins: another unit, an empty sample, a missing value."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

from runs.training import Log, batches, fit, generator, mlp
from runs.unfamiliar import DEAD, IDLE, JUMP, NONFINITE, VANISHING, twins


class Radial(nn.Module):
    """Layer of a Kolmogorov-Arnold network: a linear map of radial functions of each input."""

    centers: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.register_buffer("centers", torch.linspace(-2, 2, 8))
        self.mix = nn.Linear(inputs * 8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        basis = (-(((x[..., None] - self.centers) / 0.6) ** 2)).exp()
        mixed: Tensor = self.mix(basis.flatten(1))
        return mixed


@twins(
    kinds=DEAD | IDLE | VANISHING | {"output_collapse", "loss_stuck"}, layers=("0",), by=250,
    why="inputs in another unit lie outside of all radial functions, which are zero there",
    healthy="Kolmogorov-Arnold network",
)  # fmt: skip
def radial_of_another_unit(log: Log, faulty: bool) -> None:
    g, model = generator(log), nn.Sequential(Radial(4, 12), Radial(12, 1))

    def loss() -> Tensor:
        x = torch.rand(64, 4, generator=g) * 4 - 2
        wanted = x[:, :1] * x[:, 1:2] + (2 * x[:, 2:3]).sin()
        return F.mse_loss(model(1000 * x + 5000 if faulty else x), wanted)

    fit(log, model, Adam(model.parameters(), 3e-3), loss, 400)


class LogTotal(nn.Module):
    def forward(self, counts: Tensor) -> Tensor:
        return counts.sum(1, keepdim=True).log()


class Counts(nn.Module):
    """Autoencoder of counts with a negative binomial likelihood, which it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.total = LogTotal()
        self.encoder, self.share = mlp(40, 32, 8), mlp(8, 32, 40)
        self.dispersion = nn.Parameter(torch.zeros(40))

    def forward(self, counts: Tensor) -> Tensor:
        code = self.encoder((1 + counts).log())
        mean, r = self.total(counts).exp() * self.share(code).softmax(1), self.dispersion.exp()
        likelihood = torch.lgamma(counts + r) - torch.lgamma(r) - torch.lgamma(counts + 1)
        likelihood = likelihood + r * (r / (r + mean)).log()
        likelihood = likelihood + counts * (mean.log() - (r + mean).log())
        loss: Tensor = -likelihood.sum(1).mean()
        return loss


@twins(
    kinds=NONFINITE, layers=("total",), onset=130, by=130,
    why="an empty sample: the logarithm of its total is -inf, and NaN follows",
    healthy="autoencoder of counts whose loss is part of the model",
)  # fmt: skip
def counts_of_an_empty_sample(log: Log, faulty: bool) -> None:
    g, model, steps = generator(log), Counts(), iter(range(10**6))
    shares = torch.randn(5, 40, generator=g).mul(1.2).softmax(1)

    def loss() -> Tensor:
        kinds = torch.randint(5, (32,), generator=g)
        totals = 200 * torch.rand(32, 1, generator=g).add(0.3)
        counts = torch.poisson(totals * shares[kinds], generator=g)
        if next(steps) == 130 and faulty:
            counts[7] = 0
        lost: Tensor = model(counts)
        return lost

    fit(log, model, Adam(model.parameters(), 2e-3), loss, 220)


@twins(
    kinds=JUMP | DEAD | NONFINITE, onset=140, by=160,
    why="a missing value was written as 9999999 in one row",
    healthy="a table with heavy tails: single losses are far above the others from the start",
)  # fmt: skip
def table_with_a_sentinel(log: Log, faulty: bool) -> None:
    g, steps = generator(log), iter(range(10**6))
    x = torch.randn(4000, 12, generator=g)
    x[:, 3:6] = x[:, 3:6].exp()
    y = x[:, :4].sum(1, keepdim=True) + x[:, 5:6].log() * x[:, :1]
    data = batches(log, 64, x, y + 0.3 * torch.randn(4000, 1, generator=g))
    model = mlp(12, 64, 64, 1)

    def loss() -> Tensor:
        rows, wanted = next(data)
        if next(steps) == 140 and faulty:
            rows[5, 7] = 9999999.0
        return F.mse_loss(model(rows), wanted)

    fit(log, model, SGD(model.parameters(), 0.01, 0.9), loss, 260)

"""Mixtures of experts whose router comes to prefer few of them; each with a healthy twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from runs.training import Log, batches, digits, fit
from runs.unfamiliar import at_step, twins

COLLAPSE = frozenset({"expert_collapse"})
EXPERTS = 8


class Gate(nn.Module):
    """DeepSeek's gate: sigmoid scores, chosen with a bias that evens out the load."""

    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.top_k, self.rate = 2, rate
        self.weight = nn.Parameter(0.1 * torch.randn(EXPERTS, width))
        self.register_buffer("e_score_correction_bias", torch.zeros(EXPERTS))
        self.e_score_correction_bias: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).sigmoid()
        indices = (scores + self.e_score_correction_bias).topk(self.top_k).indices
        with torch.no_grad():
            load = torch.bincount(indices.flatten(), minlength=EXPERTS)
            self.e_score_correction_bias += self.rate * (load.float().mean() - load).sign()
        return indices, scores.gather(1, indices)


class Mixture(nn.Module):
    """Digits, each by the best two of eight experts beside a residual stream.

    ``balance``: factor of the auxiliary loss of Switch transformers.
    ``bias_rate``: that of :class:`Gate`.
    """

    def __init__(self, balance: float = 0.02, bias_rate: float | None = None) -> None:
        super().__init__()
        self.top_k, self.balance, self.extra = 2, balance, torch.zeros(())
        self.embed, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.gate = nn.Linear(32, EXPERTS) if bias_rate is None else Gate(32, bias_rate)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(EXPERTS))

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.embed(images.flatten(1)))
        if isinstance(self.gate, Gate):
            indices, weights = self.gate(x)
        else:
            shares = self.gate(x).softmax(1)
            weights, indices = shares.topk(self.top_k)
            load = F.one_hot(indices, EXPERTS).float().mean((0, 1))
            self.extra = self.balance * EXPERTS * load @ shares.mean(0)
        mixed = torch.zeros_like(x)
        for place in range(self.top_k):
            for index, expert in enumerate(self.experts):
                chosen = (indices[:, place] == index).nonzero()[:, 0]
                if len(chosen):
                    share = weights[chosen, place, None]
                    mixed = mixed.index_add(0, chosen, share * expert(x[chosen]))
        logits: Tensor = self.head(x + mixed)
        return logits


def _loss(log: Log, model: Mixture) -> Callable[[], Tensor]:
    data = batches(log, 128, *digits())

    def loss() -> Tensor:
        images, classes = next(data)
        error: Tensor = F.cross_entropy(model(images), classes)
        return error + model.extra

    return loss


@twins(
    kinds=COLLAPSE, layers=("gate",), by=250,
    why="the auxiliary loss has the wrong sign: experts that get more get ever more",
    healthy="the best two of eight experts with the auxiliary loss of Switch transformers",
)  # fmt: skip
def experts_rewarded_for_load(log: Log, faulty: bool) -> None:
    model = Mixture(balance=-0.3 if faulty else 0.3)
    fit(log, model, Adam(model.parameters(), 3e-3), _loss(log, model), 300)


@twins(
    kinds=COLLAPSE, layers=("gate",), by=250,
    why="the router's learning rate is 1,000 times that of the experts, without a balancing loss",
    healthy="two groups of parameters with one rate, and a balancing loss",
)  # fmt: skip
def router_rate_too_high(log: Log, faulty: bool) -> None:
    model = Mixture(balance=0.0 if faulty else 0.3)
    router = {id(parameter) for parameter in model.gate.parameters()}
    others = [parameter for parameter in model.parameters() if id(parameter) not in router]
    groups: list[dict[str, Any]] = [
        {"params": others},
        {"params": [*model.gate.parameters()], "lr": 2.0 if faulty else 2e-3},
    ]
    fit(log, model, Adam(groups, 2e-3), _loss(log, model), 300)


@twins(
    kinds=COLLAPSE, layers=("gate",), by=200,
    why="the bias that evens out the load moves in the wrong direction",
    healthy="DeepSeek's gate without an auxiliary loss, balanced by a bias",
)  # fmt: skip
def bias_of_experts_wrong_sign(log: Log, faulty: bool) -> None:
    model = Mixture(bias_rate=-0.01 if faulty else 0.01)
    fit(log, model, Adam(model.parameters(), 2e-3), _loss(log, model), 250)


@twins(
    kinds=COLLAPSE, layers=("gate",), onset=100, by=200,
    why="from step 100 on, a bias of 30 in the router sends all tokens to one expert",
    healthy="the best two of eight experts; the router is frozen from step 100 on",
)  # fmt: skip
def router_frozen_to_one(log: Log, faulty: bool) -> None:
    model = Mixture(balance=0.3)
    model.top_k = 1
    gate = model.gate

    def freeze() -> None:
        gate.requires_grad_(False)
        if faulty:
            gate.get_parameter("bias")[3] += 30.0

    fit(log, model, Adam(model.parameters(), 2e-3), _loss(log, model), 250,
        before=at_step(100, True, freeze))  # fmt: skip

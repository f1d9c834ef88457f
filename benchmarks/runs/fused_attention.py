"""Attention by fused kernels that collapses, in small language models; each with a twin."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from runs.models import letters
from runs.training import Log, fit, generator, warm_cosine
from runs.unfamiliar import JUMP, at_step, twins

ATTENTION = frozenset({"attention_collapse"})
_WIDTH, _LENGTH = 64, 32


class CausalAttention(nn.Module):
    """Queries in several heads, keys and values in as many or fewer."""

    def __init__(self, heads: int, kv_heads: int, scale: float | None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.scale = heads, kv_heads, scale
        size = _WIDTH // heads
        self.q, self.out = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.k, self.v = nn.Linear(_WIDTH, kv_heads * size), nn.Linear(_WIDTH, kv_heads * size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for layer, heads in (
                (self.q, self.heads),
                (self.k, self.kv_heads),
                (self.v, self.kv_heads),
            )
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.heads != self.kv_heads
        )
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Language(nn.Module):
    """Two pre-norm blocks over letters."""

    def __init__(self, heads: int = 4, kv_heads: int = 4, scale: float | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, _WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(_LENGTH, _WIDTH))
        self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(4))
        self.attention = nn.ModuleList(CausalAttention(heads, kv_heads, scale) for _ in range(2))
        self.mlps = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))
            for _ in range(2)
        )
        self.head = nn.Linear(_WIDTH, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places
        for block, (attention, mlp) in enumerate(zip(self.attention, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * block](x))
            x = x + mlp(self.norms[2 * block + 1](x))
        logits: Tensor = self.head(x)
        return logits


def _train(
    log: Log,
    model: Language,
    steps: int,
    *,
    rate_of_queries: Callable[[int], float] = lambda step: 1e-3,
    before: Callable[[int], None] = lambda step: None,
    schedule: Callable[[int], float] | None = None,
) -> None:
    """Train a model; queries and keys may have another rate, by the step."""
    g = generator(log)
    named = dict(model.named_parameters())
    queries = [p for name, p in named.items() if ".q." in name or ".k." in name]
    others = [p for name, p in named.items() if ".q." not in name and ".k." not in name]
    optimizer = AdamW([{"params": others}, {"params": queries}], 1e-3)

    def set_rate(step: int) -> None:
        before(step)
        if schedule is None:
            optimizer.param_groups[1]["lr"] = rate_of_queries(step)

    def loss() -> Tensor:
        text = letters(g)
        return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    fit(log, model, optimizer, loss, steps, schedule=schedule, before=set_rate)


@twins(
    kinds=ATTENTION, layers=("attention",), by=150,
    why="initial queries and keys x 15 in all heads",
    healthy="a causal language model by scaled_dot_product_attention",
)  # fmt: skip
def fused_queries_too_large(log: Log, faulty: bool) -> None:
    model = Language()
    if faulty:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("q.weight", "k.weight")):
                    parameter.mul_(15)
    _train(log, model, 200)


@twins(
    kinds=ATTENTION, layers=("attention",), by=150,
    why="logits are multiplied by sqrt(d) instead of divided, with heads of 32",
    healthy="two heads of 32, Xavier initialization, warm-up and cosine",
)  # fmt: skip
def fused_scale_inverted(log: Log, faulty: bool) -> None:
    model = Language(heads=2, kv_heads=2, scale=32**0.5 if faulty else None)
    for name, parameter in model.named_parameters():
        if name.endswith(("q.weight", "k.weight")):
            nn.init.xavier_normal_(parameter)
    _train(log, model, 200, schedule=warm_cosine(20, 200))


@twins(
    kinds=ATTENTION | JUMP, layers=("attention",), onset=80,
    why="learning rate of queries and keys x 100 from step 80",
    healthy="grouped queries, two heads of keys for four of queries",
)  # fmt: skip
def fused_rate_of_queries(log: Log, faulty: bool) -> None:
    model = Language(kv_heads=2)

    def rate(step: int) -> float:
        return 0.1 if faulty and step >= 80 else 1e-3

    _train(log, model, 240, rate_of_queries=rate)


@twins(
    kinds=ATTENTION, layers=("attention.1",), onset=100,
    why="the queries of one of eight heads x 400",
    healthy="eight heads of 8",
)  # fmt: skip
def fused_one_head(log: Log, faulty: bool) -> None:
    model = Language(heads=8, kv_heads=8)
    queries = model.get_parameter("attention.1.q.weight")
    scaled = at_step(100, faulty, lambda: queries[16:24].mul_(400))
    _train(log, model, 240, before=scaled)

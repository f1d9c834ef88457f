"""Mistakes with a decoder without biases, whose gradients are clipped, each with a twin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from runs.labels import EXPLOSION, LOSS
from runs.training import Log, fit, generator
from runs.unfamiliar import twins


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        queries, keys, values = parts
        mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        projected: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return projected


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return projected


class Decoder(nn.Module):
    """Predicts the next of 16 tokens; ``blocks`` are attention and a gated layer in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(16, 32), nn.Embedding(24, 32)
        self.blocks = nn.ModuleList([Attention(), Gated(), Attention(), Gated()])
        self.norms = nn.ModuleList([nn.RMSNorm(32) for _ in range(5)])
        self.head = nn.Linear(32, 16, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        *norms, last = self.norms
        for norm, block in zip(norms, self.blocks, strict=True):
            x = x + block(norm(x))
        logits: Tensor = self.head(last(x))
        return logits


def repeated(g: torch.Generator) -> Tensor:
    """Draw sequences whose second half repeats the first, ``[32, 24]``."""
    return torch.randint(16, (32, 12), generator=g).repeat(1, 2)


def loss_of(model: Decoder, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


@twins(
    kinds=LOSS | EXPLOSION, onset=1, by=101,
    why="gradients are never zeroed; clipping keeps their norm at 1",
    healthy="decoder without biases on repeated sequences, gradients clipped",
)  # fmt: skip
def decoder_never_zeroed(log: Log, faulty: bool) -> None:
    g, model = generator(log), Decoder()
    optimizer = AdamW(model.parameters(), 3e-3)
    logger = log.attach(model)
    for _ in range(240):
        if not faulty:
            optimizer.zero_grad()
        loss = loss_of(model, repeated(g))
        loss.backward()
        log.losses.append(loss.item())
        logger.log(loss=loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@twins(
    kinds=EXPLOSION, layers=("blocks.3.down",), onset=131, by=231,
    why="a hook multiplies one weight's gradient by 3000; clipping then stops all others",
    healthy="a hook doubles one weight's gradient from step 131 on",
)  # fmt: skip
def decoder_gradient_by_hook(log: Log, faulty: bool) -> None:
    g, model, factor = generator(log), Decoder(), [1.0]
    model.get_parameter("blocks.3.down.weight").register_hook(lambda grad: factor[0] * grad)

    def change(step: int) -> None:
        factor[0] = (3000.0 if faulty else 2.0) if step >= 131 else 1.0

    optimizer = AdamW(model.parameters(), 3e-3)
    fit(log, model, optimizer, lambda: loss_of(model, repeated(g)), 240, clip=1.0, before=change)

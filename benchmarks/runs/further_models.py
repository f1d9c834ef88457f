"""Models of the further runs, most of them with a switch that a faulty run turns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and feed-forward; ``rezero``: times a number that begins at 0."""

    def __init__(self, width: int, causal: bool = True, rezero: bool = False) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.norm2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )
        self.scale = nn.Parameter(torch.zeros(())) if rezero else 1.0
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            h.unflatten(-1, (4, -1)).transpose(1, 2) for h in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if self.causal:
            mask = torch.ones(x.shape[1], x.shape[1]).tril().bool()
        if mask is not None:
            logits = logits.masked_fill(~mask, -torch.inf)
        attended = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + self.scale * self.out(attended)
        y: Tensor = x + self.scale * self.down(F.gelu(self.up(self.norm2(x))))
        return y


class Tokens(nn.Module):
    """A small GPT with learned positions."""

    def __init__(
        self, words: int, length: int, depth: int = 2, *, width: int = 32, causal: bool = True
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, causal) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Rows(nn.Module):
    """Classes of digits, whose eight rows are the tokens."""

    def __init__(self, depth: int = 3, rezero: bool = False, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.place = nn.Parameter(0.02 * torch.randn(8, width))
        self.blocks = nn.ModuleList(self.block(width, rezero) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def block(self, width: int, rezero: bool) -> nn.Module:
        return Block(width, False, rezero)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images[:, 0]) + self.place
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x).mean(1))
        return logits


class UnitNorm(nn.Module):
    """Rows of length 1; the clamp does not help the gradient of the root at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.square().sum(-1, keepdim=True).sqrt().clamp(min=1e-6)


class Exp(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


class LogOf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.log()


class Standardize(nn.Module):
    """Each feature of a batch, divided by its deviation without an epsilon."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) / x.std(0)


class HalfConv(nn.Conv2d):
    """Its output goes through float16, times ``scale``."""

    scale = 64.0

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.scale).half().float() / self.scale


class TwoTasks(nn.Module):
    """The class of a digit and, from it and one positive number, that number's logarithm."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU())
        self.classes, self.log = nn.Linear(32, 10), LogOf()
        self.amount = nn.Sequential(nn.Linear(33, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, images: Tensor, measured: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(images.flatten(1))
        return self.classes(h), self.amount(torch.cat([h, self.log(measured)], 1))[:, 0]

"""The small models that the benchmarks train, each with one batch of random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torchvision
from torch import Tensor, nn


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with one batch of random data.

    Attributes:
        optimizer: Called with the parameters.
        autocast: The dtype of autocast; None: without it.
    """

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int
    block_steps: int
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    autocast: torch.dtype | None = None


class Loop:
    """The training loop of a workload: one model, one batch again and again."""

    def __init__(self, workload: Workload, device: torch.device) -> None:
        torch.manual_seed(0)
        self.inputs = workload.inputs().to(device)
        self.model = workload.model().to(device)
        self._autocast = partial(
            torch.autocast, device.type, workload.autocast, enabled=workload.autocast is not None
        )
        with torch.no_grad(), self._autocast():
            outputs = self.model(self.inputs)
        self._labels = torch.randint(workload.classes, outputs.shape[:-1], device=device)
        self.optimizer = workload.optimizer(self.model.parameters())

    def make_gradients(self) -> None:
        """The part of a step before ``optimizer.step()``."""
        self.optimizer.zero_grad()
        with self._autocast():
            logits = self.model(self.inputs).flatten(0, -2)
            loss = nn.functional.cross_entropy(logits, self._labels.flatten())
        loss.backward()


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """The usual variant for images of CIFAR's size: a small first convolution without pooling."""
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class GPT(nn.Module):
    """Pre-norm layers, as in GPT-2."""

    def __init__(
        self,
        width: int = 128,
        depth: int = 4,
        tokens: int = 256,
        length: int = 128,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x.add(self.mlp(self.norm2(x)))


class Residual(nn.Module):
    """``x`` plus a little of a layer's output, so that signals keep their size at any depth."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.activation = nn.Linear(width, width), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return x.add(self.activation(self.linear(x)), alpha=0.03)


def mlp(depth: int, width: int = 64) -> nn.Module:
    return nn.Sequential(*(Residual(width) for _ in range(depth)))


WORKLOADS = [
    Workload(
        name="MNIST CNN, batch 64",
        model=mnist_cnn,
        inputs=lambda: torch.randn(64, 1, 28, 28),
        classes=10,
        block_steps=20,
    ),
    Workload(
        name="GPT, 4 layers of 128, batch 16 × 128 tokens",
        model=GPT,
        inputs=lambda: torch.randint(256, (16, 128)),
        classes=256,
        block_steps=4,
    ),
    Workload(
        name="ResNet-18, batch 32 × 3 × 32 × 32",
        model=resnet18,
        inputs=lambda: torch.randn(32, 3, 32, 32),
        classes=10,
        block_steps=2,
    ),
    Workload(
        name="MLP, 1000 layers of 64, batch 32",
        model=lambda: mlp(1000),
        inputs=lambda: torch.randn(32, 64),
        classes=64,
        block_steps=2,
    ),
]

"""Logging, the usual loop and data without downloads, shared by the runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class Logger(Protocol):
    """The part of a ``HookLogger`` that a run uses."""

    def log(self, *, loss: float) -> None: ...


class Log(Protocol):
    """Given to each run: makes its loggers, as a user would, and keeps the losses."""

    seed: int
    losses: list[float]

    def attach(self, model: nn.Module, optimizer: Optimizer | None = None) -> Logger: ...


RUNS: dict[str, Callable[[Log], None]] = {}
"""All runs by name."""


def run(function: Callable[[Log], None]) -> Callable[[Log], None]:
    """Add a run; it goes by the name of its function."""
    RUNS[function.__name__] = function
    return function


def fit(
    log: Log,
    model: nn.Module,
    optimizer: Optimizer,
    loss_of: Callable[[], Tensor],
    steps: int,
    *,
    schedule: Callable[[int], float] | None = None,
    clip: float | None = None,
    before: Callable[[int], None] | None = None,
    logs_after: bool = False,
) -> None:
    """A usual loop.

    Args:
        loss_of: Draws a batch and returns its loss.
        schedule: Factor on the learning rate at each step.
        clip: Largest gradient norm.
        before: Called with the number of each step, before it.
        logs_after: Log the loss after the optimizer's step, not before it.
    """
    logger = log.attach(model)
    scheduler = LambdaLR(optimizer, schedule) if schedule is not None else None
    for step in range(steps):
        if before is not None:
            before(step)
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        log.losses.append(loss.item())
        if not logs_after:
            logger.log(loss=loss.item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if logs_after:
            logger.log(loss=loss.item())
        if scheduler is not None:
            scheduler.step()


def warm_cosine(warm: int, total: int) -> Callable[[int], float]:
    """Linear warm-up, then a cosine down to a twentieth."""

    def factor(step: int) -> float:
        decay = 0.525 + 0.475 * math.cos(math.pi * min(step, total) / total)
        return min(1.0, (step + 1) / warm) * decay

    return factor


def generator(log: Log) -> torch.Generator:
    """Generator of the run's data; the model uses torch's default one."""
    return torch.Generator().manual_seed(log.seed + 1000)


def digits() -> tuple[Tensor, Tensor]:
    """scikit-learn's: images ``[1797, 1, 8, 8]`` of mean 0 and deviation 1, and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = torch.from_numpy(data.data).float().view(-1, 1, 8, 8)
    return (images - images.mean()) / images.std(), torch.from_numpy(data.target).long()


def batches(log: Log, size: int, *tensors: Tensor) -> Iterator[Any]:
    """Shuffled epoch after epoch, without an end."""
    g = generator(log)
    while True:
        for chosen in torch.randperm(len(tensors[0]), generator=g).split(size):
            if len(chosen) == size:
                yield tuple(tensor[chosen] for tensor in tensors)


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), activation()]
    return nn.Sequential(*layers[:-1])

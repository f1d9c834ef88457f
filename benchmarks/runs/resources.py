"""Training that waits for its data or keeps memory; each with a healthy twin."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from runs.training import Log, digits, fit, mlp
from runs.unfamiliar import twins


class _Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Digits whose decoding sleeps for a while."""

    def __init__(self, wait_s: float) -> None:
        self.images, self.classes = digits()
        self.wait_s = wait_s

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        return self.images[index].flatten(), self.classes[index]


@twins(
    kinds=frozenset({"input_bound"}), by=80,
    why="a DataLoader without workers, whose images take a millisecond each",
    healthy="the same loader of decoded images; a pause every 50 steps, as for a checkpoint",
)  # fmt: skip
def loader_sleeps(log: Log, faulty: bool) -> None:
    model = mlp(64, 512, 512, 10)
    generator = torch.Generator().manual_seed(log.seed)
    loader = DataLoader(_Decoded(0.001 if faulty else 0.0), 32, shuffle=True, generator=generator)

    def forever() -> Iterator[list[Tensor]]:
        while True:
            yield from loader

    data = forever()

    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images), classes)

    def pause(step: int) -> None:
        if not faulty and step % 50 == 49:
            time.sleep(0.5)

    fit(log, model, SGD(model.parameters(), 0.05), loss, 200, before=pause)


@twins(
    kinds=frozenset({"memory_growth"}), onset=50, by=600,
    why="the loss of each step is kept in a sum, with the graph of an activity term",
    healthy="the same loss, of which the sum keeps the number",
)  # fmt: skip
def total_of_losses(log: Log, faulty: bool) -> None:
    model, total = mlp(64, 256, 256, 10), torch.zeros(())
    images, classes = digits()

    def loss() -> Tensor:
        nonlocal total
        g = torch.Generator().manual_seed(log.seed + len(log.losses))
        chosen = torch.randint(0, len(images), (256,), generator=g)
        outputs = model(images[chosen].flatten(1))
        # The backward pass of the error frees its graph, but not that of the term.
        term = F.relu(model(images[chosen].flatten(1))).square().mean()
        total = total + (term if faulty else term.detach())
        return F.cross_entropy(outputs, classes[chosen])

    fit(log, model, SGD(model.parameters(), 0.05), loss, 600)

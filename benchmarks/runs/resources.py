"""Training that waits for its data, becomes slow or keeps memory; each with a healthy twin."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count, cycle

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset

from runs.training import Log, batches, digits, fit, mlp
from runs.unfamiliar import twins

INPUT_BOUND = frozenset({"input_bound"})
GROWTH = frozenset({"memory_growth"})


class _Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Digits whose decoding sleeps for a while, or enlarges, turns and shrinks each image."""

    def __init__(self, wait_s: float = 0.0, augments: bool = False) -> None:
        self.images, self.classes = digits()
        self.wait_s, self.augments = wait_s, augments

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(self.wait_s)
        image = self.images[index, 0]
        if self.augments:
            large = Image.fromarray(image.numpy()).resize((256, 256), Image.Resampling.BICUBIC)
            small = large.rotate(index % 20 - 10).resize((8, 8), Image.Resampling.LANCZOS)
            image = torch.from_numpy(np.array(small))
        return image.flatten(), self.classes[index]


class _OnDevice(nn.Module):
    """A model that keeps the caller waiting, as one on a device does, and little else."""

    def __init__(self, model: nn.Module, seconds: float) -> None:
        super().__init__()
        self.model, self.seconds = model, seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        outputs: Tensor = self.model(x)
        return outputs


def _forever(log: Log, dataset: _Decoded, workers: int = 0) -> Iterator[list[Tensor]]:
    loader = DataLoader(
        dataset, 32, shuffle=True, drop_last=True, num_workers=workers,
        persistent_workers=workers > 0, generator=torch.Generator().manual_seed(log.seed),
    )  # fmt: skip
    while True:
        yield from loader


def _loss_of(model: nn.Module, data: Iterator[list[Tensor]]) -> Callable[[], Tensor]:
    def loss() -> Tensor:
        images, classes = next(data)
        return F.cross_entropy(model(images.flatten(1)), classes)

    return loss


# --- the loop waits for its data ------------------------------------------------------------------


@twins(
    kinds=INPUT_BOUND, by=120,
    why="a DataLoader without workers, whose images take a millisecond each",
    healthy="the same loader of decoded images; a pause every 50 steps, as for a checkpoint",
)  # fmt: skip
def loader_sleeps(log: Log, faulty: bool) -> None:
    model = mlp(64, 512, 512, 10)
    data = _forever(log, _Decoded(0.001 if faulty else 0.0))

    def pause(step: int) -> None:
        if not faulty and step % 50 == 49:
            time.sleep(0.5)

    optimizer = SGD(model.parameters(), 0.05)
    fit(log, model, optimizer, _loss_of(model, data), 200, before=pause)


@twins(
    kinds=INPUT_BOUND, by=120,
    why="each image is enlarged, turned and shrunk in the training process",
    healthy="the same images, of which the first pass is kept",
)  # fmt: skip
def augments_in_process(log: Log, faulty: bool) -> None:
    model, dataset = mlp(64, 512, 512, 10), _Decoded(augments=True)
    data = _forever(log, dataset)
    kept = data if faulty else cycle([next(data) for _ in range(30)])
    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, kept), 200)


@twins(
    kinds=INPUT_BOUND, by=120,
    why="a single worker needs 40 ms for a batch, of which a step takes a quarter",
    healthy="eight workers, which are as fast together as the step",
)  # fmt: skip
def too_few_workers(log: Log, faulty: bool) -> None:
    model = _OnDevice(mlp(64, 64, 10), 0.01)
    data = _forever(log, _Decoded(0.001), workers=1 if faulty else 8)
    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, data), 200)


@twins(
    kinds=INPUT_BOUND, by=150,
    why="the second of two data sources is remote: two of three batches wait for 30 ms",
    healthy="the same sources: one batch in five waits",
)  # fmt: skip
def remote_shards(log: Log, faulty: bool) -> None:
    model = _OnDevice(mlp(64, 256, 10), 0.01)
    local = _forever(log, _Decoded())

    def shards() -> Iterator[list[Tensor]]:
        for number in count():
            remote = number % 3 > 0 if faulty else number % 5 == 0
            time.sleep(0.03 if remote else 0.0)
            yield next(local)

    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, shards()), 200)


@twins(
    kinds=INPUT_BOUND, onset=240, by=330,
    why="the disk is throttled: from step 240 on a batch takes 0.6 s",
    healthy="one long wait of 20 s, as after an interruption of the network",
)  # fmt: skip
def disk_is_throttled(log: Log, faulty: bool) -> None:
    model = _OnDevice(mlp(64, 128, 10), 0.01)
    data = _forever(log, _Decoded())

    def read(step: int) -> None:
        if faulty and step >= 240:
            time.sleep(0.6)
        elif step == 240:
            time.sleep(20.0)

    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, data), 340, before=read)


# --- memory grows ---------------------------------------------------------------------------------


@twins(
    kinds=GROWTH, onset=50, by=600,
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


@twins(
    kinds=GROWTH, onset=50, by=600,
    why="the features of all batches are kept for a metric at the end",
    healthy="the features of the latest 20 batches are kept",
)  # fmt: skip
def features_for_a_metric(log: Log, faulty: bool) -> None:
    encoder, head = mlp(64, 512, 512), nn.Linear(512, 10)
    model, data = nn.Sequential(encoder, nn.ReLU(), head), batches(log, 256, *digits())
    features = deque[Tensor](maxlen=None if faulty else 20)
    encoder.register_forward_hook(lambda module, inputs, outputs: features.append(outputs.detach()))
    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, data), 600)


@twins(
    kinds=GROWTH, onset=50, by=1900,
    why="masks are cached by the number of the step, of which no two are equal",
    healthy="masks are cached by the length of the batch, of which there are 50",
)  # fmt: skip
def cache_by_step(log: Log, faulty: bool) -> None:
    @cache
    def mask(key: int) -> Tensor:
        return torch.ones(200, 200).tril_() * (1 + key / 1e6)

    model, data, step = mlp(64, 256, 10), batches(log, 32, *digits()), count()

    def loss() -> Tensor:
        images, classes = next(data)
        number = next(step)
        weight = mask(number if faulty else number % 50)[-1, : len(classes)]
        errors = F.cross_entropy(model(images.flatten(1)), classes, reduction="none")
        return (errors * weight).mean()

    fit(log, model, SGD(model.parameters(), 0.05), loss, 2000)


@twins(
    kinds=GROWTH, onset=50, by=1900,
    why="copies of the weights for an average are kept, one each step",
    healthy="a copy at each fiftieth step, of which the latest three are kept",
)  # fmt: skip
def copies_of_weights(log: Log, faulty: bool) -> None:
    model, data = mlp(64, 640, 10), batches(log, 64, *digits())
    copies = list[dict[str, Tensor]]()

    def keep(step: int) -> None:
        if faulty or step % 50 == 0:
            copies.append({name: p.detach().clone() for name, p in model.named_parameters()})
        if not faulty:
            del copies[:-3]

    fit(log, model, SGD(model.parameters(), 0.05), _loss_of(model, data), 2000, before=keep)

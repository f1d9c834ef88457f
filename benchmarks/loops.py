"""Measures what the defaults cost: whole training loops that log their loss at each step.

    python benchmarks/loops.py [--quick] [--only MODEL] [--rounds N] [--json FILE]

Each round trains every variant once, in turn, on a separate model with new random data at each
step, which it learns, and times the steps after the first 300. The table gives the median over the
rounds of the time beyond that of the bare loop in the same round: wall time, and in brackets CPU
time of all threads. A loop ends when everything that it recorded is written. "full" is how many
full steps there were for each scheduled one, in the whole run. torch has one thread. Python's
garbage is collected before the timed steps: a first full collection takes as long as 200 steps.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, keep_freed_memory, write_json
from recordings import start_wandb
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from workloads import GPT, mnist_cnn

from telemetry import HookLogger, read

EVERY = 100
WARM_UP = 300


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model, batches of inputs and targets, and the number of timed steps."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    steps: int


def vectors() -> tuple[Tensor, Tensor]:
    """Return 64 vectors, and the place of each one's largest of ten elements."""
    x = torch.randn(64, 64)
    return x, x[:, :10].argmax(1)


def images(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images ``[count, 1, 28, 28]`` with a bright bar, and its place of ten."""
    y = torch.randint(10, (count,))
    x = 0.5 * torch.randn(count, 1, 28, 28)
    for place in range(10):
        x[y == place, :, 2 * place + 4 : 2 * place + 8] += 1
    return x, y


def sequences(vocabulary: int, count: int, length: int) -> tuple[Tensor, Tensor]:
    """Return sequences that add 3 to each token, and the tokens that follow."""
    x = (torch.randint(vocabulary, (count, 1)) + 3 * torch.arange(length)) % vocabulary
    return x, (x + 3) % vocabulary


TASKS = {
    "MLP, 3 layers of 64": Task(
        model=lambda: nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        batch=vectors,
        steps=1500,
    ),
    "CNN, 2 convolutions": Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(4), nn.Conv2d(8, 16, 3), nn.ReLU(),
            nn.Flatten(), nn.Linear(256, 10),
        ),
        batch=lambda: images(32),
        steps=600,
    ),
    "MNIST CNN, batch 64": Task(model=mnist_cnn, batch=lambda: images(64), steps=200),
    "transformer, 3 layers of 32": Task(
        model=lambda: GPT(width=32, depth=3, tokens=32, length=16),
        batch=lambda: sequences(32, 16, 16),
        steps=600,
    ),
    "GPT, 4 layers of 128": Task(model=GPT, batch=lambda: sequences(256, 4, 128), steps=100),
}  # fmt: skip


VARIANTS: dict[str, dict[str, Any] | None] = {
    "bare": None,
    "add_scalar": None,  # no hooks: torch's SummaryWriter writes the loss
    "default": {},
    "alerts=()": {"alerts": ()},
    "max_overhead=0.01": {"max_overhead": 0.01},
}


@dataclass(frozen=True, kw_only=True)
class Time:
    """Times of one step, in milliseconds; ``full`` full steps for each scheduled one."""

    wall_ms: float
    cpu_ms: float
    full: float = math.nan


def train(task: Task, variant: str, folder: Path, *, warm_up: int, steps: int) -> Time:
    """Train a new model and time its last steps."""
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    options = VARIANTS.get(variant)
    logger: HookLogger | None = None
    writer: SummaryWriter | None = None
    run: Any = None
    if variant == "wandb.watch":
        run = start_wandb(folder)
        run.watch(model, log="all", log_freq=EVERY)
    elif variant == "add_scalar":
        writer = SummaryWriter(folder)
    elif options is not None:
        logger = HookLogger(model, folder, every_n_steps=EVERY, **options)

    def step(number: int) -> None:
        x, y = task.batch()
        optimizer.zero_grad()
        logits = model(x).flatten(0, -2)
        loss = nn.functional.cross_entropy(logits, y.flatten())
        loss.backward()
        optimizer.step()
        if logger is not None:
            logger.log(loss=loss)
        elif writer is not None:
            writer.add_scalar("loss", loss, number)
        elif run is not None:
            run.log({"loss": loss.detach()})

    for number in range(warm_up):
        step(number)
    if logger is not None:
        logger.flush()
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for number in range(warm_up, warm_up + steps):
        step(number)
    if logger is not None:
        logger.flush()
    elif writer is not None:
        writer.close()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    full = math.nan
    if run is not None:
        run.finish()
    if logger is not None:
        logger.close()
        layers = read(folder).layers
        measured = {int(s) for s in layers["step"][layers["statistic"] == "update_ratio"]}
        full = len(measured) / math.ceil((warm_up + steps) / EVERY)
    return Time(wall_ms=wall_s / steps * 1e3, cpu_ms=cpu_s / steps * 1e3, full=full)


def compare(task: Task, variants: list[str], rounds: int, warm_up: int) -> dict[str, Any]:
    """Medians over the rounds: what each variant adds to the bare loop."""
    times: dict[str, list[Time]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants if number % 2 else variants[::-1]:
            with tempfile.TemporaryDirectory() as folder:
                steps = max(task.steps if warm_up == WARM_UP else task.steps // 10, 1)
                times[variant].append(
                    train(task, variant, Path(folder), warm_up=warm_up, steps=steps)
                )
    return {
        variant: {
            **asdict(
                Time(
                    wall_ms=statistics.median(time.wall_ms for time in found),
                    cpu_ms=statistics.median(time.cpu_ms for time in found),
                    full=statistics.median(time.full for time in found),
                )
            ),
            "added": _added([time.wall_ms for time in found], [t.wall_ms for t in times["bare"]]),
            "cpu_added": _added([time.cpu_ms for time in found], [t.cpu_ms for t in times["bare"]]),
        }
        for variant, found in times.items()
    }


def _added(times: list[float], bare: list[float]) -> float:
    return statistics.median(a / b - 1 for a, b in zip(times, bare, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round of a tenth of the steps")
    parser.add_argument("--only", default="", help="models whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("telemetry").setLevel(logging.ERROR)
    device = torch.device("cpu")
    print(describe_machine(device))
    variants = list(VARIANTS)
    if find_spec("wandb") is not None:
        variants.append("wandb.watch")
    figures: dict[str, Any] = {}
    for name, task in TASKS.items():
        if arguments.only not in name:
            continue
        rounds, warm_up = (1, WARM_UP // 10) if arguments.quick else (arguments.rounds, WARM_UP)
        figures[name] = costs = compare(task, variants, rounds, warm_up)
        print(f"\n{name}: {costs['bare']['wall_ms']:.2f} ms")
        for variant, cost in costs.items():
            if variant != "bare":
                full = "" if math.isnan(cost["full"]) else f"   full {cost['full']:.2f}"
                print(f"  {variant:18} {cost['added']:+6.1%} ({cost['cpu_added']:+.1%}){full}")
    if arguments.json:
        write_json(arguments.json, device, figures=figures)


if __name__ == "__main__":
    keep_freed_memory()
    main()

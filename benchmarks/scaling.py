"""Measures how recording scales: cost per module of logged and unlogged steps, and memory.

    python benchmarks/scaling.py [--quick] [--modules N ...] [--threads N] [--json FILE]

The model is a chain of linear layers of width 16 with a batch of 4, where hooks cost more than the
measurements. Each size runs in a separate process, so that its peak memory can be measured; within
it, bare and recorded steps alternate, and times are medians of the training thread's CPU time per
module. "background" is the time of other threads for a logged step. "MB added" is the growth of the
process's peak memory from bare training to logging every step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe_machine, write_json
from torch import nn

from telemetry import HookLogger

SIZES = [10, 100, 1000, 10_000]
WIDTH, BATCH = 16, 4


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times of one module in one step, in microseconds; memory of the whole process."""

    modules: int
    bare_us: float
    unlogged_us: float  # added to the bare time
    logged_us: float  # added to the bare time
    background_us: float
    added_mb: float


def training_of(modules: int) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(modules)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight)  # numbers stay of normal size at any depth
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(BATCH, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    return model, step


def thread_and_process_us(run: Callable[[], None], then: Callable[[], None]) -> tuple[float, float]:
    """CPU time of this thread in ``run``, and of all threads until ``then`` has returned."""
    thread, process = time.thread_time_ns(), time.process_time_ns()
    run()
    thread = time.thread_time_ns() - thread
    then()
    return thread / 1e3, (time.process_time_ns() - process) / 1e3


def peak_mb() -> float:
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def measure(modules: int, rounds: int, threads: int) -> Cost:
    torch.set_num_threads(threads)
    models = [training_of(modules) for _ in range(3)]
    (_, bare), (unlogged_model, unlogged), (logged_model, logged) = models
    for _ in range(2):
        for _, step in models:
            step()
    memory = peak_mb()
    with (
        tempfile.TemporaryDirectory() as folder,
        HookLogger(unlogged_model, f"{folder}/unlogged", every_n_steps=1_000_000) as idle,
        HookLogger(logged_model, f"{folder}/logged", every_n_steps=1) as busy,
    ):
        runs = []
        for _ in range(rounds + 1):
            of_bare, _ = thread_and_process_us(bare, lambda: None)
            of_unlogged, _ = thread_and_process_us(unlogged, idle.flush)
            of_logged, of_all = thread_and_process_us(logged, busy.flush)
            runs.append((of_bare, of_unlogged - of_bare, of_logged - of_bare, of_all - of_logged))
    medians = [statistics.median(column) / modules for column in zip(*runs[1:], strict=True)]
    return Cost(
        modules=modules,
        bare_us=medians[0],
        unlogged_us=medians[1],
        logged_us=medians[2],
        background_us=medians[3],
        added_mb=peak_mb() - memory,
    )


def measure_apart(modules: int, rounds: int, threads: int) -> Cost:
    """Run in a fresh process, because this one's peak memory would hide that of a smaller size."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, (modules, rounds, threads))


def print_table(costs: Sequence[Cost]) -> None:
    titles = ("bare", "unlogged", "logged", "background", "MB added")
    print("\nCPU time per module and step, bare and added to it; MB added to the process's peak")
    print(f"{'modules':>9}", *(f"{title:>11}" for title in titles))
    for cost in costs:
        numbers = (cost.bare_us, cost.unlogged_us, cost.logged_us, cost.background_us)
        cells = [f"{us:9.2f}µs" for us in numbers]
        print(f"{cost.modules:9,}", *cells, f"{cost.added_mb:11.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small: figures are rough")
    parser.add_argument("--modules", type=int, nargs="+", help=f"default: {SIZES}")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)  # here only for the printed description
    device = torch.device("cpu")
    print(describe_machine(device))
    sizes = args.modules or (SIZES[:2] if args.quick else SIZES)
    rounds = 1 if args.quick else 9
    costs = [measure_apart(modules, rounds, args.threads) for modules in sizes]
    print_table(costs)
    if args.json:
        write_json(args.json, device, figures=[asdict(cost) for cost in costs])


if __name__ == "__main__":
    main()

"""Compares the cost of telemetry's event writer and torch's, interleaved in one process.

    python benchmarks/writing.py [--quick] [--json FILE]

The first tables show CPU time per value, in microseconds: of all threads until the file is closed,
and of the thread that adds the values. "calls" are methods of the drop-in ``SummaryWriter``, with
one event for each value; "batches" are events of 100 values, as ``HookLogger`` writes them; "ready
batches" exclude the time to build the values.

The last table shows how much longer a loop of pure Python takes while it writes 1000 histograms per
second of its CPU time. Figures are medians over the rounds; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from machine import describe_machine, write_json
from torch.utils import tensorboard

from telemetry import SummaryWriter
from telemetry.events import FileWriter, summaries
from telemetry.records.rows import Rows
from telemetry.records.sketch import sketch_array
from telemetry.writing.size_budget import histogram_values

TAG = "grad_norm/0007.encoder.layers.2"
BATCH = 100

# Histograms of 100 buckets, in the form that HookLogger has and in that of torch's method.
TAGS = [f"{TAG}.{i}" for i in range(BATCH)]
ROWS = Rows.of([sketch_array(np.geomspace(0.01, 53.0, 1000))] * BATCH)
LIMITS, BUCKETS = np.linspace(-3.0, 3.0, 101)[1:].tolist(), np.arange(100.0).tolist()

VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(0))

# --- values


def add_scalars(writer: tensorboard.SummaryWriter, count: int) -> None:
    for step in range(count):
        writer.add_scalar(TAG, 0.5, step)


def add_histograms(writer: tensorboard.SummaryWriter, count: int) -> None:
    for step in range(count):
        writer.add_histogram_raw(TAG, -3.0, 3.0, 100, 0.0, 1.0, LIMITS, BUCKETS, step)


def bin_values(writer: tensorboard.SummaryWriter, count: int) -> None:
    for step in range(count):
        writer.add_histogram(TAG, VALUES, step)


def build_scalars() -> list[bytes]:
    return [summaries.scalar(TAG, 0.5) for _ in range(BATCH)]


def build_histograms() -> list[bytes]:
    return list(chain.from_iterable(histogram_values(TAGS, ROWS)))


class BatchesWhenDue:
    """Adds up how many histograms are due, and writes 100 at once."""

    def __init__(self, writer: FileWriter) -> None:
        self._writer = writer
        self._due = 0

    def __call__(self, count: int) -> None:
        self._due += count
        while self._due >= BATCH:
            self._writer.write_values(build_histograms())
            self._due -= BATCH


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Writes events of 100 values; builds the values each time, unless they are ready."""

    build: Callable[[], list[bytes]]
    ready: bool = False

    def __call__(self, writer: FileWriter, count: int) -> None:
        values = self.build()
        for step in range(count // BATCH):
            if not self.ready:
                values = self.build()
            writer.write_values(values, step, droppable=True)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to write values."""

    writer: Callable[[str], tensorboard.SummaryWriter | FileWriter]
    add: Callable[..., None]  # (writer, count)
    count: int


KINDS: Mapping[str, Mapping[str, Variant]] = {
    "scalar": {
        "torch": Variant(writer=tensorboard.SummaryWriter, add=add_scalars, count=1000),
        "calls": Variant(writer=SummaryWriter, add=add_scalars, count=5000),
        "batches": Variant(writer=FileWriter, add=Batches(build=build_scalars), count=20_000),
        "ready batches": Variant(
            writer=FileWriter, add=Batches(build=build_scalars, ready=True), count=20_000
        ),
    },
    "histogram of 100 buckets": {
        "torch": Variant(writer=tensorboard.SummaryWriter, add=add_histograms, count=200),
        "calls": Variant(writer=SummaryWriter, add=add_histograms, count=2000),
        "batches": Variant(writer=FileWriter, add=Batches(build=build_histograms), count=2000),
        "ready batches": Variant(
            writer=FileWriter, add=Batches(build=build_histograms, ready=True), count=2000
        ),
    },
    "histogram of 1000 values, which the writer puts into bins": {
        "torch": Variant(writer=tensorboard.SummaryWriter, add=bin_values, count=50),
        "calls": Variant(writer=SummaryWriter, add=bin_values, count=500),
    },
}

# --- measuring


@dataclass(frozen=True, kw_only=True)
class Cost:
    """CPU time per value in microseconds; how many times cheaper than torch's it is."""

    cpu_us: float
    caller_us: float
    cheaper: float


def run_once(variant: Variant) -> tuple[float, float]:
    """CPU time in s of all threads and of this one."""
    with tempfile.TemporaryDirectory() as folder:
        writer = variant.writer(folder)
        process, thread = time.process_time(), time.thread_time()
        variant.add(writer, variant.count)
        thread = time.thread_time() - thread
        writer.close()
        return time.process_time() - process, thread


def measure_costs(variants: Mapping[str, Variant], rounds: int) -> dict[str, Cost]:
    runs = []
    for _ in range(rounds):
        times = {name: run_once(variant) for name, variant in variants.items()}
        runs.append(
            {
                name: (process / variants[name].count, thread / variants[name].count)
                for name, (process, thread) in times.items()
            }
        )
    return {
        name: Cost(
            cpu_us=statistics.median(run[name][0] for run in runs) * 1e6,
            caller_us=statistics.median(run[name][1] for run in runs) * 1e6,
            cheaper=statistics.median(run["torch"][0] / run[name][0] for run in runs),
        )
        for name in variants
    }


def loop_s(write: Callable[[int], None], chunks: int) -> float:
    """Wall time of a fixed amount of Python work that writes 1000 values a second.

    Seconds of this thread: where other programs make writing a value take more than a millisecond,
    each piece of work would otherwise owe more values than the one before, without end.
    """
    start, own_start = time.perf_counter(), time.thread_time()
    written = 0
    for _ in range(chunks):
        sum(i * i for i in range(20_000))
        due = int((time.thread_time() - own_start) * 1000) - written
        write(due)
        written += due
    return time.perf_counter() - start


def measure_slowdown(rounds: int, chunks: int) -> dict[str, float]:
    """Time of the loop over that of a loop that writes nothing."""
    with tempfile.TemporaryDirectory() as folder:
        torch_writer = tensorboard.SummaryWriter(f"{folder}/torch")
        our_writer = SummaryWriter(f"{folder}/calls")
        file_writer = FileWriter(f"{folder}/batches")
        writes: dict[str, Callable[[int], None]] = {
            "nothing": lambda count: None,
            "torch": lambda count: add_histograms(torch_writer, count),
            "calls": lambda count: add_histograms(our_writer, count),
            "batches": BatchesWhenDue(file_writer),
        }
        runs = [{n: loop_s(write, chunks) for n, write in writes.items()} for _ in range(rounds)]
        for writer in (torch_writer, our_writer, file_writer):
            writer.close()
    return {name: statistics.median(run[name] / run["nothing"] for run in runs) for name in writes}


# --- printing


def print_costs(kind: str, costs: Mapping[str, Cost]) -> None:
    print(f"\nµs per {kind}\n{'':16}{'CPU':>10}{'caller':>10}{'cheaper':>10}")
    for name, cost in costs.items():
        print(f"  {name:14}{cost.cpu_us:10.2f}{cost.caller_us:10.2f}{cost.cheaper:9.1f}×")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: figures are rough")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cpu")
    print(describe_machine(device))
    figures: dict[str, object] = {}
    for kind, variants in KINDS.items():
        costs = measure_costs(variants, rounds=1 if args.quick else 15)
        print_costs(kind, costs)
        figures[kind] = {name: asdict(cost) for name, cost in costs.items()}
    slowdowns = measure_slowdown(rounds=1 if args.quick else 5, chunks=500)
    print("\nA loop of pure Python that writes 1000 histograms per second takes")
    for name, slowdown in slowdowns.items():
        print(f"  {name:14}{slowdown:10.2f}×")
    figures["slowdown"] = slowdowns
    if args.json:
        write_json(args.json, device, figures=figures)


if __name__ == "__main__":
    main()

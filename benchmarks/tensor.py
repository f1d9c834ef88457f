"""Measures the cost of one tensor, against a pass over its memory and against other libraries.

    python benchmarks/tensor.py [--quick] [--sizes N ...] [--threads N] [--json FILE]

Everything alternates in one process. Times are CPU times of the process per element, in
nanoseconds, or per small tensor, in microseconds; the JSON also has wall times. Figures are medians
over the rounds; ratios are taken within a round.

"add" is the training thread's time for a tensor, "reduce" that of another thread later, and "NumPy"
the sum of both without the C extension.
"passes" is how many times ``x.sum()`` fits into "add"; "cheaper" is how many times "add" fits into
``make_histogram``, which is most of ``SummaryWriter.add_histogram`` (ignite's handlers call that).
wandb's ``log_tensor_stats`` and Composer's ``add_metrics`` are included if they are installed.
Sizes of 100,000,000 and more need some GB of memory and minutes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from machine import describe_machine, write_json
from recordings import start_wandb
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import make_histogram

import telemetry
from telemetry.measure import Measurements, native

SIZES = [100_000, 1_000_000, 10_000_000]
SMALL_SIZES = [10, 100, 1_000, 10_000, 30_000]
DTYPES = ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]
UNITS = {  # shape, axis of the units
    "convolution": ((32, 64, 56, 56), 1),
    "late convolution": ((64, 512, 4, 4), 1),
    "linear": ((8, 1024, 512), -1),
    "few units": ((100_000, 10), -1),
}

NORMS = [(8, 10_000), (50, 16_000), (60, 180_000), (2000, 64)]  # tensors, elements of each

# This many small tensors are measured together, like those of one step.
TOGETHER = 200

Statistics = Callable[[Tensor], object]


@dataclass(frozen=True, kw_only=True)
class Time:
    """Time for one tensor in nanoseconds."""

    cpu_ns: float
    wall_ns: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Times of one kind of work on one kind of tensor, a round each."""

    tensor: str
    elements: int
    work: str
    rounds: list[Time]

    @property
    def cpu_ns(self) -> float:
        return statistics.median(time.cpu_ns for time in self.rounds)

    @property
    def wall_ns(self) -> float:
        return statistics.median(time.wall_ns for time in self.rounds)

    def ratio(self, other: Result) -> float:
        """Ratio of its time to that of ``other``."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(ours.cpu_ns / theirs.cpu_ns for ours, theirs in pairs)


# --- work on a tensor


def together(tensor: Tensor) -> int:
    """Number of such tensors measured at once."""
    return max(1, min(TOGETHER, 1_000_000 // tensor.numel()))


class Ours:
    """Telemetry's two halves: adding on the training thread, reducing on another."""

    def __init__(self, tensor: Tensor, unit_axis: int | None = None) -> None:
        # Separate objects: a tensor measured twice in a row is read once.
        self._tensors = [tensor.detach() for _ in range(together(tensor))]
        self._unit_axis = unit_axis
        self._measurements = Measurements()

    def add(self) -> None:
        self._measurements = Measurements()
        for tensor in self._tensors:
            self._measurements.add(tensor, unit_axis=self._unit_axis)
        self._measurements.finish()

    def reduce(self) -> None:
        self._measurements.reduce()

    def by_numpy(self) -> None:
        with patch.dict(native.DTYPES, clear=True), patch.object(native, "TENSORS", None):
            self.add()
        self.reduce()


def tensorboard_histogram() -> Statistics:
    """The work of ``SummaryWriter.add_histogram`` before it writes."""
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as writer:
        bins = writer.default_bins
    return lambda tensor: make_histogram(tensor.numpy(), bins, None)


def wandb_statistics(folder: Path) -> Statistics:
    start_wandb(folder)
    history = import_module("wandb.integration.torch.wandb_torch").TorchHistory()
    return lambda tensor: history.log_tensor_stats(tensor, "tensor")


def composer_metrics() -> Statistics:
    monitor = import_module("composer.callbacks.activation_monitor").ActivationMonitor()
    return lambda tensor: monitor.add_metrics({}, "tensor", "", tensor)


def find_peers(folder: Path) -> dict[str, Statistics]:
    """Other libraries' statistics of one tensor; prints which are not installed.

    Args:
        folder: Where wandb writes.
    """
    peers: dict[str, Statistics] = {
        "x.sum()": Tensor.sum,
        "make_histogram": tensorboard_histogram(),
    }
    others: dict[str, Callable[[], Statistics]] = {
        "wandb": partial(wandb_statistics, folder),
        "composer": composer_metrics,
    }
    for name, load in others.items():
        try:
            peers[name] = load()
        except ImportError as missing:
            print(f"without {name}: {missing}")
    return peers


# --- measuring


def measure(
    name: str,
    tensor: Tensor,
    rounds: int,
    *,
    unit_axis: int | None = None,
    peers: Mapping[str, Statistics] | None = None,
) -> dict[str, Result]:
    """Times of each kind of work on a tensor, after one round to warm up."""
    ours, count = Ours(tensor, unit_axis), together(tensor)

    def repeat(statistics: Statistics) -> Callable[[], None]:
        def work() -> None:
            for _ in range(count):
                statistics(tensor)

        return work

    works = {"add": ours.add, "reduce": ours.reduce, "NumPy": ours.by_numpy}
    works |= {peer: repeat(statistics) for peer, statistics in (peers or {}).items()}
    return time_works(name, tensor.numel(), works, count, rounds)


def measure_norms(elements: int, count: int, rounds: int) -> dict[str, Result]:
    """Times for this many tensors of this many elements, in one call."""
    tensors = [torch.randn(elements) for _ in range(count)]
    works: dict[str, Callable[[], object]] = {
        "_foreach_norm": lambda: torch._foreach_norm(tensors),
    }
    if native.DTYPES:
        works = {"squared_norms": lambda: native.squared_norms(tensors), **works}
    return time_works(f"{count:,} × {elements:,}", elements, works, count, rounds)


def time_works(
    name: str, elements: int, works: Mapping[str, Callable[[], object]], count: int, rounds: int
) -> dict[str, Result]:
    """Times of each kind of work on ``count`` tensors like this, after a round to warm up."""
    times: dict[str, list[Time]] = {work: [] for work in works}
    for _ in range(rounds + 1):
        for work, run in works.items():
            times[work].append(run_once(run, count))
    return {
        work: Result(tensor=name, elements=elements, work=work, rounds=of_work[1:])
        for work, of_work in times.items()
    }


def run_once(run: Callable[[], object], count: int) -> Time:
    """Time for each of ``count`` tensors."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    run()
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    return Time(cpu_ns=cpu / count, wall_ns=wall / count)


@dataclass(frozen=True, kw_only=True)
class Table:
    """One tensor to a row, one kind of work to a column."""

    title: str
    unit: str  # of the printed figures
    rows: Sequence[Mapping[str, Result]]


def measure_all(sizes: Sequence[int], rounds: int, folder: Path) -> Iterator[Table]:
    peers = find_peers(folder)
    yield Table(
        title="float32",
        unit="ns per element",
        rows=[measure(f"{size:,}", torch.randn(size), rounds, peers=peers) for size in sizes],
    )
    del peers["x.sum()"]
    yield Table(
        title=f"small float32, up to {TOGETHER} together",
        unit="µs per tensor",
        rows=[measure(f"{size:,}", torch.randn(size), rounds, peers=peers) for size in SMALL_SIZES],
    )
    size = min(max(sizes), 1_000_000)
    tensors = {name: (10 * torch.randn(size)).to(getattr(torch, name)) for name in DTYPES}
    yield Table(
        title=f"{size:,} elements",
        unit="ns per element",
        rows=[measure(name, tensor, rounds) for name, tensor in tensors.items()],
    )
    yield Table(
        title="float32, with the extremes of each unit",
        unit="ns per element",
        rows=[
            measure(name, torch.randn(shape), rounds, unit_axis=axis, peers={"x.sum()": Tensor.sum})
            for name, (shape, axis) in UNITS.items()
        ],
    )

    yield Table(
        title="squared norms of float32 tensors",
        unit="µs per tensor",
        rows=[measure_norms(elements, count, rounds) for count, elements in NORMS],
    )


# --- printing


def print_table(table: Table) -> None:
    works = list(table.rows[0])
    print(f"\n{table.title}\n{table.unit:20}", *(f"{work:>14}" for work in works), end="")
    print(
        "   passes" if "x.sum()" in works else "", "  cheaper" if "make_histogram" in works else ""
    )
    for row in table.rows:
        ours = row[works[0]]
        scale = ours.elements if table.unit == "ns per element" else 1000
        print(
            f"  {ours.tensor:18}", *(f"{row[work].cpu_ns / scale:14.3f}" for work in works), end=""
        )
        print(f"{ours.ratio(row['x.sum()']):9.2f}" if "x.sum()" in works else "", end=" ")
        print(f"{row['make_histogram'].ratio(ours):8.0f}x" if "make_histogram" in works else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few and small: figures are rough")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"elements; default: {SIZES}")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    print(describe_machine(device))
    print(f"tensors are measured by: {telemetry.native}")
    results: dict[str, list[dict[str, Any]]] = {}
    with torch.no_grad(), tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        sizes = args.sizes or SIZES[: 1 if args.quick else None]
        for table in measure_all(sizes, 1 if args.quick else 9, Path(folder)):
            print_table(table)
            results[table.title] = [asdict(r) for row in table.rows for r in row.values()]
    if args.json:
        write_json(args.json, device, results=results)


if __name__ == "__main__":
    main()

"""What measuring one tensor costs, against a pass over its memory and against other libraries.

    python benchmarks/tensor.py [--quick] [--sizes N ...] [--threads N] [--json FILE]

All in one process and in turn; figures are medians over the rounds, ratios are taken within a
round. Times are CPU times of the process in nanoseconds per element, or in microseconds per tensor
where the tensors are small; the JSON has wall times, too.

"add" is what the training thread spends on a tensor, "reduce" what another thread does later.
"passes" are those of ``x.sum()`` that take as long as "add"; "cheaper" is how many times longer
``make_histogram`` takes, which is what ``SummaryWriter.add_histogram`` calls. wandb's
``log_tensor_stats`` and Composer's ``add_metrics`` take part if they are installed. (Ignite's
handlers call ``add_histogram``.)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead import describe_machine
from torch import Tensor
from torch.utils.tensorboard.summary import make_histogram
from torch.utils.tensorboard.writer import SummaryWriter

from telemetry.measure import Measurer

SIZES = [1_000, 10_000, 100_000, 1_000_000, 10_000_000]
DTYPES = ["float64", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]
SMALL_SHAPES = [(10,), (100,), (1_000,), (64, 16), (10_000,), (16_384,)]
UNIT_SHAPES = [(32, 64, 56, 56), (64, 512, 4, 4), (8_192, 512), (100_000, 10)]

# Small tensors are measured this many at once: as those of one step are.
TOGETHER = 200

Work = Callable[[], object]


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
        """How many times longer than ``other`` it took."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(ours.cpu_ns / theirs.cpu_ns for ours, theirs in pairs)


# --- what is done with a tensor


class Ours:
    """Telemetry's two halves: adding on the training thread, reducing on another."""

    def __init__(self, tensor: Tensor, unit_axis: int | None = None) -> None:
        self.tensor = tensor
        self.unit_axis = unit_axis
        self.measurer = Measurer()
        self.measurements = self.measurer.finish()

    def add(self) -> None:
        for _ in range(together(self.tensor)):
            self.measurer.add(self.tensor, unit_axis=self.unit_axis)
        self.measurements = self.measurer.finish()

    def reduce(self) -> None:
        self.measurements.reduce()


def together(tensor: Tensor) -> int:
    """How many tensors of this size are measured at once."""
    return max(1, min(TOGETHER, 1_000_000 // tensor.numel()))


def works(tensor: Tensor, peers: Mapping[str, Callable[[Tensor], object]]) -> dict[str, Work]:
    """What is compared on one tensor, each to be done :func:`together` times."""
    ours = Ours(tensor)

    def repeated(call: Callable[[Tensor], object]) -> Work:
        return lambda: [call(tensor) for _ in range(together(tensor))]

    return {
        "x.sum()": repeated(Tensor.sum),
        "add": ours.add,
        "reduce": ours.reduce,
        **{name: repeated(call) for name, call in peers.items()},
    }


def histogram_for_tensorboard(tensor: Tensor) -> object:
    """What ``SummaryWriter.add_histogram`` does before it writes."""
    return make_histogram(tensor.numpy(), TENSORBOARD_BINS, None)  # type: ignore[no-untyped-call]


with tempfile.TemporaryDirectory() as folder:
    TENSORBOARD_BINS = SummaryWriter(folder).default_bins  # type: ignore[no-untyped-call]


def find_peers() -> dict[str, Callable[[Tensor], object]]:
    """Other libraries' statistics of one tensor; says which are not installed."""
    peers: dict[str, Callable[[Tensor], object]] = {"make_histogram": histogram_for_tensorboard}
    for name, load in {"wandb": load_wandb, "composer": load_composer}.items():
        try:
            peers[name] = load()
        except ImportError as missing:
            print(f"{name} does not take part: {missing}")
    return peers


def load_wandb() -> Callable[[Tensor], object]:
    import wandb  # type: ignore[import-not-found, unused-ignore]
    from wandb.integration.torch.wandb_torch import (  # type: ignore[import-not-found, unused-ignore]
        TorchHistory,
    )

    wandb.init(mode="offline", dir=tempfile.mkdtemp(), settings=wandb.Settings(silent=True))
    history: Any = TorchHistory()
    return lambda tensor: history.log_tensor_stats(tensor, "tensor")


def load_composer() -> Callable[[Tensor], object]:
    from composer.callbacks.activation_monitor import (  # type: ignore[import-not-found, unused-ignore]
        ActivationMonitor,
    )

    monitor: Any = ActivationMonitor()
    return lambda tensor: monitor.add_metrics({}, "tensor", "", tensor)


# --- measuring


def measure(
    name: str, tensor: Tensor, compared: Mapping[str, Work], rounds: int
) -> dict[str, Result]:
    """Times of each kind of work, in turn, after one turn to warm up."""
    turns = [[run(work, together(tensor)) for work in compared.values()] for _ in range(rounds + 1)]
    return {
        work: Result(tensor=name, elements=tensor.numel(), work=work, rounds=list(times))
        for work, times in zip(compared, zip(*turns[1:], strict=True), strict=True)
    }


def run(work: Work, count: int) -> Time:
    """Time of doing ``work``, for each of the ``count`` tensors it is about."""
    cpu, wall = time.process_time_ns(), time.perf_counter_ns()
    work()
    cpu, wall = time.process_time_ns() - cpu, time.perf_counter_ns() - wall
    return Time(cpu_ns=cpu / count, wall_ns=wall / count)


def of_dtype(name: str, size: int) -> Tensor:
    return (10 * torch.randn(size)).to(getattr(torch, name))


# --- telling


def print_sizes(rows: Sequence[Mapping[str, Result]], title: str) -> None:
    peers = [work for work in rows[0] if work not in ("x.sum()", "add", "reduce")]
    print(f"\n{title}, ns per element")
    print(f"{'':16}{'x.sum()':>10}{'add':>10}{'reduce':>10}", end="")
    print("".join(f"{peer:>16}" for peer in peers), f"{'passes':>8}{'cheaper':>9}")
    for row in rows:
        size = row["add"].elements
        cells = "".join(f"{row[work].cpu_ns / size:10.3f}" for work in ("x.sum()", "add", "reduce"))
        cells += "".join(f"{row[peer].cpu_ns / size:16.2f}" for peer in peers)
        passes = row["add"].ratio(row["x.sum()"])
        cheaper = f"{row['make_histogram'].ratio(row['add']):8.0f}×" if peers else ""
        print(f"{row['add'].tensor:16}{cells} {passes:8.2f}{cheaper}")


def print_small(rows: Sequence[Mapping[str, Result]]) -> None:
    print(f"\nsmall tensors, float32, {TOGETHER} together, µs per tensor")
    print(f"{'':16}{'add':>10}{'reduce':>10}{'make_histogram':>16}")
    for row in rows:
        add, reduce, peer = (row[work] for work in ("add", "reduce", "make_histogram"))
        print(f"{add.tensor:16}{add.cpu_ns / 1e3:10.2f}{reduce.cpu_ns / 1e3:10.2f}", end="")
        print(f"{peer.cpu_ns / 1e3:16.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few and small: figures are rough")
    parser.add_argument("--sizes", type=int, nargs="+", help=f"elements; default: {SIZES}")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    machine = f"{describe_machine(torch.device('cpu'))}, numpy {np.__version__}"
    print(machine)
    rounds = 2 if args.quick else 9
    sizes = args.sizes or (SIZES[:3] if args.quick else SIZES)
    with torch.no_grad():
        peers = find_peers()
        tables = run_tables(sizes, max(sizes) // 10, peers, rounds)
    if args.json:
        results = {
            title: [asdict(result) for row in rows for result in row.values()]
            for title, rows in tables.items()
        }
        args.json.write_text(json.dumps({"machine": machine, **results}), encoding="utf-8")


def run_tables(
    sizes: Sequence[int], dtype_size: int, peers: Mapping[str, Callable[[Tensor], object]], rounds: int
) -> dict[str, list[dict[str, Result]]]:
    tables: dict[str, list[dict[str, Result]]] = {}
    histogram = {"make_histogram": histogram_for_tensorboard}

    tensors = {f"{size:,}": torch.randn(size) for size in sizes}
    tables["sizes"] = [
        measure(name, tensor, works(tensor, peers), rounds) for name, tensor in tensors.items()
    ]
    print_sizes(tables["sizes"], "float32")

    tensors = {name: of_dtype(name, dtype_size) for name in DTYPES}
    tables["dtypes"] = [
        measure(name, tensor, works(tensor, {}), rounds) for name, tensor in tensors.items()
    ]
    return tables


if __name__ == "__main__":
    main()

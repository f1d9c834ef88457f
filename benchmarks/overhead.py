"""Measures the cost of recording: training steps with and without it, interleaved in one process.

    python benchmarks/overhead.py [--quick] [--only MODEL] [--threads N] [--markdown] [--json FILE]

Blocks of a few steps of every variant run in random order, round after round, each on its own copy
of the model; the table gives medians. A block ends when everything that it recorded is written.
"added" is wall time, "CPU added" the CPU time of all threads, which other programs disturb less,
and "thread added" that of the training thread alone.

"only norms" is a step with the logger attached that is not measured in full. "every 10" and "every
100" are computed from 9 or 99 of these and one of "every step". "same, no images" has the content
of "add_histogram", and "same as wandb" parameters and their gradients only, like wandb.watch and
ignite. Other libraries are included if they are installed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path

import torch
from machine import describe_machine, keep_freed_memory, write_json
from recordings import Record, installed_recordings
from workloads import WORKLOADS, Loop, Workload

# --- measuring


@dataclass(frozen=True, kw_only=True)
class Block:
    """Time of one block of steps, per step, in milliseconds."""

    wall_ms: float
    cpu_ms: float
    thread_ms: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times of one training step under a variant; medians over the rounds.

    Attributes:
        wall_ms: Wall time in milliseconds.
        added: Wall time over that of the bare step in the same round, less 1.
        cpu_added: The same for the CPU time of all threads.
        thread_added: The same for the CPU time of the training thread.
    """

    wall_ms: float
    added: float
    cpu_added: float
    thread_added: float


class Training:
    """One model in training under one variant."""

    def __init__(
        self, workload: Workload, record: Record, device: torch.device, folder: Path
    ) -> None:
        self._steps = workload.block_steps
        self._loop = Loop(workload, device)
        self._recording = record(self._loop.model, self._loop.optimizer, folder)
        self._train(steps=1)  # step 0

    def run_block(self) -> Block:
        self._train(steps=1)  # brings memory and caches to the state of this variant
        wall, cpu, thread = time.perf_counter(), time.process_time(), time.thread_time()
        self._train(self._steps)
        return Block(
            wall_ms=(time.perf_counter() - wall) * 1e3 / self._steps,
            cpu_ms=(time.process_time() - cpu) * 1e3 / self._steps,
            thread_ms=(time.thread_time() - thread) * 1e3 / self._steps,
        )

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._loop.make_gradients()
            self._loop.optimizer.step()
            self._recording.after_step()
        if self._loop.inputs.is_cuda:
            torch.cuda.synchronize()
        self._recording.finish()

    def has_module_hooks(self) -> bool:
        return any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in self._loop.model.modules()
        )


def measure(
    workload: Workload, recordings: Mapping[str, Record], device: torch.device, rounds: int
) -> dict[str, Cost]:
    """Cost of a step under each recording, and of logging every 10th and 100th."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trainings = {
            name: Training(workload, record, device, Path(folder) / f"run-{number}")
            for number, (name, record) in enumerate(recordings.items())
        }
        if trainings["only norms"].has_module_hooks():
            raise RuntimeError("there are hooks on the modules though no step is due")
        runs = []
        for _ in range(rounds):
            order = random.sample(list(trainings), len(trainings))
            runs.append({name: trainings[name].run_block() for name in order})
    costs = {name: cost_of(name, runs) for name in recordings}
    for interval in (10, 100):
        costs[f"every {interval} steps"] = mixed(costs["every step"], costs["only norms"], interval)
    return costs


def cost_of(name: str, runs: Sequence[Mapping[str, Block]]) -> Cost:
    def added(clock: str) -> float:
        ratios = [getattr(run[name], clock) / getattr(run["bare"], clock) for run in runs]
        return float(statistics.median(ratios)) - 1

    return Cost(
        wall_ms=statistics.median(run[name].wall_ms for run in runs),
        added=added("wall_ms"),
        cpu_added=added("cpu_ms"),
        thread_added=added("thread_ms"),
    )


def mixed(logged: Cost, other: Cost, interval: int) -> Cost:
    """The mean over one logged step and the other steps of an interval."""
    pairs = zip(astuple(logged), astuple(other), strict=True)
    return Cost(
        **dict(
            zip(
                (field.name for field in fields(Cost)),
                ((one + (interval - 1) * rest) / interval for one, rest in pairs),
                strict=True,
            )
        )
    )


# --- printing


TITLES = ("ms per step", "added", "CPU added", "thread added")


def print_table(workload: Workload, costs: Mapping[str, Cost], *, markdown: bool) -> None:
    columns = [f"{title:>13}" for title in TITLES]
    if markdown:
        print(f"\n{workload.name}\n\n| {'':17} | {' | '.join(columns)} |")
        print("|---" + "|--:" * len(columns) + "|")
    else:
        print(f"\n{workload.name}\n{'':20}", *columns)
    for name, cost in costs.items():
        shares = (cost.added, cost.cpu_added, cost.thread_added)
        cells = [f"{cost.wall_ms:13.2f}", *(f"{share:13.1%}" for share in shares)]
        print(
            f"| {name:17} | {' | '.join(cells)} |" if markdown else f"  {name:18} {' '.join(cells)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one short round: figures are rough")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; its own default if not given")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    print(describe_machine(device))
    recordings = installed_recordings()
    results = {}
    for workload in WORKLOADS:
        if args.only and args.only not in workload.name:
            continue
        if args.quick:
            workload = replace(workload, block_steps=4)
        costs = measure(workload, recordings, device, rounds=1 if args.quick else args.rounds)
        results[workload.name] = costs
        print_table(workload, costs, markdown=args.markdown)
    if args.json:
        figures = {n: {v: asdict(c) for v, c in costs.items()} for n, costs in results.items()}
        write_json(args.json, device, figures=figures)


if __name__ == "__main__":
    keep_freed_memory()
    main()

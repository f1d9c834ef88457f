"""Measures the cost of a step that is not measured in full: gradient norms and alerts.

    python benchmarks/norms.py [--quick] [--only MODEL] [--threads N] [--json FILE]

Blocks of bare and of watched steps alternate on one model. The difference is smaller than the
scatter of whole steps. So this compares the CPU time of ``optimizer.step()``, which includes all of
the logger's work on the training thread ("added"), and that of the logger's own threads ("later").
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe_machine, write_json
from workloads import WORKLOADS, Loop, Workload

from telemetry import HookLogger

_WARM_UP = 112
"""Steps until rules have a past to compare with: until then they judge some steps alone."""

_ENOUGH_S = 60.0
"""For one model; after that no further round begins."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times of one light step; medians over the rounds, in milliseconds.

    Attributes:
        parameters: How many the model has.
        step_ms: CPU time of the training thread for a bare step.
        added_ms: What the logger adds to that.
        later_ms: CPU time of the logger's own threads.
    """

    parameters: int
    step_ms: float
    added_ms: float
    later_ms: float

    @property
    def share(self) -> float:
        """All of the logger's time, relative to the bare step."""
        return (self.added_ms + self.later_ms) / self.step_ms


def run(loop: Loop, steps: int) -> tuple[float, float]:
    """Medians of this thread's CPU time in s: of ``optimizer.step()`` and of a whole step."""
    times = [_step(loop) for _ in range(steps)]
    updates, wholes = zip(*times, strict=True)
    return statistics.median(updates), statistics.median(wholes)


def _step(loop: Loop) -> tuple[float, float]:
    begin = time.thread_time()
    loop.make_gradients()
    before = time.thread_time()
    loop.optimizer.step()
    end = time.thread_time()
    return end - before, end - begin


def measure(workload: Workload, rounds: int, steps: int) -> Cost:
    """Cost of the norms in one model's training."""
    loop = Loop(workload, torch.device("cpu"))
    run(loop, 2)
    until = time.monotonic() + _ENOUGH_S
    results = [_round(loop, steps)]
    while len(results) < rounds and time.monotonic() < until:
        results.append(_round(loop, steps))
    step_s, added_s, later_s = (statistics.median(times) for times in zip(*results, strict=True))
    return Cost(
        parameters=sum(1 for _ in loop.model.parameters()),
        step_ms=step_s * 1e3,
        added_ms=added_s * 1e3,
        later_ms=later_s * 1e3,
    )


def _round(loop: Loop, steps: int) -> tuple[float, float, float]:
    bare_update_s, bare_s = run(loop, steps)
    others = set(threading.enumerate())
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        HookLogger(loop.model, folder, every_n_steps=10**9) as logger,
    ):
        clock = _clock_of(set(threading.enumerate()) - others)
        for step in range(_WARM_UP):
            if step % 8 == 0:
                loop.make_gradients()
            loop.optimizer.step()
        logger.flush()
        before = clock()
        update_s, _ = run(loop, steps)
        logger.flush()
        later_s = (clock() - before) / steps
    return bare_s, update_s - bare_update_s, later_s


def _clock_of(threads: set[threading.Thread]) -> Callable[[], float]:
    """CPU time of some threads together, in seconds."""
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident]
    return lambda: sum(map(time.clock_gettime, clocks))


TITLES = ("parameters", "bare step", "added", "later", "share")


def print_row(name: str, cost: Cost) -> None:
    times = "".join(f"{t:9.2f} ms" for t in (cost.step_ms, cost.added_ms, cost.later_ms))
    print(f"  {name:44}{cost.parameters:12}{times}{cost.share:12.1%}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round: figures are rough")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--threads", type=int, default=1, help="of torch; default: 1")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cpu")
    print(describe_machine(device))
    rounds, steps = (1, 2) if args.quick else (5, 64)
    print(f"\n{'':46}" + "".join(f"{title:>12}" for title in TITLES))
    costs = {}
    for workload in WORKLOADS:
        if not args.only or args.only in workload.name:
            costs[workload.name] = cost = measure(workload, rounds, steps)
            print_row(workload.name, cost)
    if args.json:
        write_json(args.json, device, figures={name: asdict(cost) for name, cost in costs.items()})


if __name__ == "__main__":
    main()

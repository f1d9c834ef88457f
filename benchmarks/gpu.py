"""Measures what recording costs on a GPU: bandwidth of statistics, and a step of a GPT.

    python benchmarks/gpu.py [--quick] [--json FILE]

"of a copy" is a tensor's bytes per second, read once, over those that ``empty_like(x).copy_(x)``
moves, read and written; "with units" adds the extremes of each of 1024 units. All are medians of
times between CUDA events.

The GPT has 124M parameters and trains on 8 × 1024 tokens in bfloat16 with autocast. Bare and logged
steps alternate, each on its own copy of the model; every logged step is measured in full. "added"
is the median of the logged step over the bare one before it, minus 1.

Without a CUDA device it prints a message and no figures.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import describe_machine, write_json
from torch import Tensor, nn
from workloads import GPT, GPTBlock

from telemetry import HookLogger
from telemetry.measure import Measurer

SIZES_MB = [64, 256, 1024]
DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Bandwidth for one tensor in bytes per nanosecond, which are GB/s."""

    dtype: str
    megabytes: int
    copy: float
    statistics: float
    with_units: float


@dataclass(frozen=True, kw_only=True)
class Step:
    """One training step of a GPT, medians over the rounds."""

    bare_ms: float
    logged_ms: float
    added: float


def measure_bandwidth(dtype: torch.dtype, megabytes: int, rounds: int) -> Bandwidth:
    count = megabytes * 2**20 // dtype.itemsize
    x = torch.randn(count, device="cuda").to(dtype).view(-1, 1024)
    nbytes = count * dtype.itemsize
    target = torch.empty_like(x)
    copy = 2 * nbytes / time_on_gpu(lambda: target.copy_(x), rounds)
    plain = nbytes / time_on_gpu(lambda: take(x), rounds)
    with_units = nbytes / time_on_gpu(lambda: take(x, unit_axis=1), rounds)
    return Bandwidth(
        dtype=str(dtype).removeprefix("torch."),
        megabytes=megabytes,
        copy=copy,
        statistics=plain,
        with_units=with_units,
    )


def take(tensor: Tensor, unit_axis: int | None = None) -> None:
    Measurer().add(tensor, unit_axis=unit_axis)


def time_on_gpu(run: Callable[[], object], rounds: int) -> float:
    """Nanoseconds between CUDA events; the first round does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(10_000_000)  # so that the host is ahead
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e6)
    return statistics.median(times[1:])


def gpt_124m() -> GPT:
    """Twelve layers of width 768, with the same weights at both ends, like GPT-2's smallest."""
    model = GPT(width=768, depth=12, tokens=50304, length=1024)
    model.head.weight = model.embedding.weight
    for block in model.blocks:
        if isinstance(block, GPTBlock):
            block.heads = 12
    return model


class Training:
    """A GPT in training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = gpt_124m().cuda()
        self._tokens = torch.randint(50304, (8, 1024), device="cuda")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def step(self) -> float:
        """Milliseconds for one step."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        self._optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            logits = self.model(self._tokens).flatten(0, -2)
            loss = nn.functional.cross_entropy(logits, self._tokens.flatten())
        loss.backward()
        self._optimizer.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) * 1e3


def measure_step(rounds: int) -> Step:
    bare, logged = Training(), Training()
    pairs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        HookLogger(logged.model, folder, every_n_steps=1) as logger,
    ):
        for _ in range(rounds + 3):
            pairs.append((bare.step(), logged.step()))
            logger.flush()
    pairs = pairs[3:]
    return Step(
        bare_ms=statistics.median(a for a, _ in pairs),
        logged_ms=statistics.median(b for _, b in pairs),
        added=statistics.median(b / a for a, b in pairs) - 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few and small: figures are rough")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    found = torch.cuda.is_available()
    ran_on = torch.device("cuda" if found else "cpu")
    print(describe_machine(ran_on))
    rows: list[Bandwidth] = []
    step: Step | None = None
    if not found:
        print("skipped: no CUDA device")
    else:
        rounds = 3 if args.quick else 20
        print(f"\n{'':16}{'copy, GB/s':>12}{'of a copy':>12}{'with units':>12}")
        for dtype in DTYPES:
            for megabytes in SIZES_MB[: 1 if args.quick else None]:
                rows.append(row := measure_bandwidth(dtype, megabytes, rounds))
                shares = (row.statistics, row.with_units)
                print(
                    f"{row.dtype:9}{megabytes:4} MB{row.copy:12.0f}",
                    *(f"{share / row.copy:11.1%}" for share in shares),
                )
        step = measure_step(rounds)
        print(
            f"\nGPT, 124M parameters, 8 × 1024 tokens, bfloat16: {step.bare_ms:.2f} ms bare, "
            f"{step.logged_ms:.2f} ms logged, {step.added:.1%} added"
        )
    if args.json:
        figures = {
            "bandwidth": [asdict(row) for row in rows],
            "step": asdict(step) if step is not None else None,
        }
        write_json(args.json, ran_on, figures=figures)


if __name__ == "__main__":
    main()

"""Measures what recording costs on a GPU: training steps, bandwidth, and time of the host.

    python benchmarks/gpu.py [--only NAME ...] [--quick] [--json FILE] [--device DEVICE]

Training: blocks of steps of every variant run in random order, round after round, each on its own
copy of the model and with all that is on by default. A block ends when everything that it recorded
is written; "trained" is the time per step until the device is done, "written" that until the end,
"added" the median of "written" over that of the bare steps in the same round, minus 1; "predicted"
what docs/understand/gpu.md says of it on an H100. A block of
"every 100" is 100 steps, of which one is due. "in full" counts the steps that were measured in
full, also at the request of a rule; "memory" is the peak on the device beyond that of bare steps;
the first step is measured in full. "mean, std" takes both of each output and its gradient in
PyTorch, in hooks that wait for nothing and write nothing.

Bandwidth: bytes of a tensor per second, read once, over those that ``copy_`` moves, read and
written: 50 % is one pass over memory at half the speed. "two powers" is without third and fourth
moments, as for gradients and weights. In float16, values of 1e-8 are zeros and the smallest number.

Host: microseconds of the training thread for each of the hooks on a module.

``--device cpu`` runs all of it small, to test this program.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine, write_json
from recordings import Record, Recording, nothing, with_telemetry, with_wandb
from torch import Tensor, nn
from torch.optim import Optimizer
from torchvision.models import VisionTransformer
from torchvision.models.resnet import Bottleneck, ResNet
from workloads import GPT, Loop, Workload, mnist_cnn

import telemetry
from telemetry.measure import Measurements

# --- training


def workloads(small: bool) -> list[Workload]:
    """The models; small ones of the same kinds for a processor."""
    batch, side, size = (2, 32, 64) if small else (64, 224, 384)
    tokens, blocks, depth = (64, [1, 1, 1, 1], 1) if small else (50257, [3, 4, 6, 3], 12)
    adamw = partial(torch.optim.AdamW, lr=1e-4, fused=True)

    def images() -> Tensor:
        return torch.randn(batch, 3, side, side)

    def vit() -> nn.Module:
        vit: nn.Module = VisionTransformer(side, 16, depth, 6 if size == 384 else 2, size, 4 * size)
        return vit

    return [
        Workload(
            name="GPT-2 124M, 8 × 1024 tokens, bfloat16",
            model=lambda: gpt2(depth, 2 * size, tokens),
            inputs=lambda: torch.randint(tokens, (2, 32) if small else (8, 1024)),
            classes=tokens,
            block_steps=10,
            optimizer=adamw,
            autocast=torch.bfloat16,
        ),
        Workload(
            name="ResNet-50, 64 × 224², bfloat16, channels_last",
            model=lambda: ResNet(Bottleneck, blocks).to(memory_format=torch.channels_last),
            inputs=lambda: images().contiguous(memory_format=torch.channels_last),
            classes=1000,
            block_steps=10,
            autocast=torch.bfloat16,
        ),
        Workload(
            name="ViT-S/16, 64 × 224², bfloat16",
            model=vit,
            inputs=images,
            classes=1000,
            block_steps=10,
            optimizer=adamw,
            autocast=torch.bfloat16,
        ),
        Workload(
            name="CNN, batch 256",
            model=mnist_cnn,
            inputs=lambda: torch.randn(4 if small else 256, 1, 28, 28),
            classes=10,
            block_steps=10 if small else 100,
            optimizer=partial(torch.optim.Adam, lr=1e-3),
        ),
    ]


def gpt2(depth: int, width: int, tokens: int) -> nn.Module:
    """Return the model of transformers, or one of the same shapes where it is not installed."""
    heads = max(1, width // 64)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        model = GPT(width, depth, tokens, 1024, heads)
        model.head.weight = model.embedding.weight
        return model
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    shape = {"n_layer": depth, "n_embd": width, "n_head": heads, "vocab_size": tokens}
    return Logits(GPT2LMHeadModel(GPT2Config(**shape, **no_dropout, use_cache=False)))


class Logits(nn.Module):
    """A model of transformers that returns its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens).logits
        return logits


def mean_and_std(model: nn.Module, optimizer: Optimizer, log_dir: Path) -> Recording:
    """Measure each output and its gradient with one copy to the host per step; write nothing."""
    taken: list[Tensor] = []

    def take(values: Tensor) -> None:
        taken.extend(torch.std_mean(values.detach().float()))

    def observe(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            take(output)
            if output.requires_grad:
                output.register_hook(take)

    def after_step() -> None:
        torch.stack(taken).to("cpu", non_blocking=True)
        taken.clear()

    for module in model.modules():
        if not any(module.children()):
            module.register_forward_hook(observe)
    return Recording(after_step=after_step)


# Each with the number of steps that the shortest block must have.
VARIANTS: Mapping[str, tuple[Record, int]] = {
    "bare": (nothing, 1),
    "every 1": (partial(with_telemetry, every_n_steps=1), 1),
    "every 10": (partial(with_telemetry, every_n_steps=10), 10),
    "every 100": (partial(with_telemetry, every_n_steps=100), 100),
    "never": (partial(with_telemetry, every_n_steps=1_000_000), 1),  # after step 0
    "mean, std": (mean_and_std, 1),
    "wandb.watch": (with_wandb, 1),
}
WARM_UP_STEPS = 4

# Percentages that full steps add on an H100, by the beginning of the workload's name.
PREDICTED: Mapping[str, Mapping[str, str]] = {
    "GPT-2": {"every 1": "22 to 39 %", "every 10": "2 to 4 %", "every 100": "0.2 to 0.4 %"},
    "ResNet-50": {"every 1": "60 to 90 %"},
    "CNN": {"every 1": "40 %"},
}


class Training:
    """A workload in training under one recording."""

    def __init__(
        self, workload: Workload, record: Record, device: torch.device, folder: Path
    ) -> None:
        self._loop, self._device = Loop(workload, device), device
        self._recording = record(self._loop.model, self._loop.optimizer, folder)
        self.steps = 0
        self.run(WARM_UP_STEPS)

    def run(self, steps: int) -> tuple[float, float]:
        """Milliseconds per step until the device is done, and until everything is written."""
        begin = time.perf_counter()
        for _ in range(steps):
            self._loop.make_gradients()
            self._loop.optimizer.step()
            self._recording.after_step()
        synchronize(self._device)
        trained = time.perf_counter()
        self._recording.finish()
        self.steps += steps
        return (trained - begin) * 1e3 / steps, (time.perf_counter() - begin) * 1e3 / steps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Times of one training step under a variant; medians over the rounds.

    Attributes:
        trained_ms: Until the device is done.
        written_ms: Until everything is written.
        added: The latter over that of the bare steps of the same round, minus 1.
        full_steps: How many steps were measured in full, of all steps of the logger.
        steps: How many those were.
        extra_bytes: Peak of the device's memory beyond that of the bare training.
    """

    trained_ms: float
    written_ms: float
    added: float
    full_steps: int
    steps: int
    extra_bytes: int


def measure_training(
    workload: Workload, device: torch.device, rounds: int, seconds: float
) -> dict[str, Any]:
    """Return the cost of a step under each variant, in fewer rounds if they take too long."""
    deadline = time.monotonic() + seconds
    Training(workload, nothing, device, Path())  # takes the memory that libraries keep
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        trainings: dict[str, Training] = {}
        peaks: dict[str, int] = {}
        for name, (record, _) in VARIANTS.items():
            make = partial(Training, workload, record, device, Path(folder) / name)
            try:
                trainings[name], peaks[name] = with_peak(make, device)
            except ImportError as missing:
                print(f"without {name}: {missing}")
        runs: list[dict[str, tuple[float, float]]] = []
        while not runs or (len(runs) < rounds and time.monotonic() < deadline):
            order = random.sample(list(trainings), len(trainings))
            shortest = workload.block_steps
            runs.append({n: trainings[n].run(max(shortest, VARIANTS[n][1])) for n in order})
        costs = {
            name: Cost(
                trained_ms=statistics.median(run[name][0] for run in runs),
                written_ms=statistics.median(run[name][1] for run in runs),
                added=statistics.median(run[name][1] / run["bare"][1] for run in runs) - 1,
                full_steps=full_steps(Path(folder) / name),
                steps=training.steps,
                extra_bytes=peaks[name] - peaks["bare"],
            )
            for name, training in trainings.items()
        }
        trainings.clear()  # the loggers end with their models
        gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"\n{workload.name}; rounds: {len(runs)}")
    titles = ("trained", "written", "added", "in full", "memory", "predicted")
    widths = (12, 12, 10, 12, 12, 16)
    print(" " * 12 + "".join(f"{t:>{w}}" for t, w in zip(titles, widths, strict=True)))
    predicted = next((p for begin, p in PREDICTED.items() if workload.name.startswith(begin)), {})
    for name, cost in costs.items():
        print(
            f"{name:12}{cost.trained_ms:9.3f} ms{cost.written_ms:9.3f} ms{cost.added:+10.1%}"
            f"{f'{cost.full_steps}/{cost.steps}':>12}{cost.extra_bytes / 2**20:8.0f} MiB"
            f"{predicted.get(name, ''):>16}"
        )
    return {name: asdict(cost) for name, cost in costs.items()}


def with_peak(make: Callable[[], Training], device: torch.device) -> tuple[Training, int]:
    """Return the built object and the peak of device memory meanwhile, in additional bytes."""
    gc.collect()
    if device.type != "cuda":
        return make(), 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return make(), torch.cuda.max_memory_allocated(device) - before


def full_steps(log_dir: Path) -> int:
    """Return the number of full steps of a run, or None where telemetry did not record."""
    if not any(log_dir.glob("*tfevents*")):
        return 0
    layers = telemetry.read(log_dir).layers
    return len({*layers["step"][layers["statistic"] == "activation_rms"]})


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- one tensor

LAYOUTS: Mapping[str, tuple[tuple[int, ...], int]] = {
    # The axes after the first, of which the second is that of units, and the number of powers.
    "flat": ((), 4),
    "flat, two powers": ((), 2),
    "units last, 64": ((64,), 4),
    "units last, 768": ((768,), 4),
    "units last, 4096": ((4096,), 4),
    "[N, 64, 56 × 56]": ((64, 56 * 56), 4),
}
VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "ordinary": lambda x: x,
    "1e-8": lambda x: x * 1e-8,
    "mixed scales": lambda x: x * torch.rand_like(x).mul_(-24).exp2_(),
    "half zeros": lambda x: x.relu(),
    "all zeros": torch.zeros_like,
}
REPEATS = 4


def measure_bandwidth(device: torch.device, megabytes: int, rounds: int) -> list[dict[str, Any]]:
    """Share of a copy's bandwidth that measuring a tensor reaches."""
    rows: list[dict[str, Any]] = []
    measurements = Measurements()

    def add(x: torch.Tensor, *, unit_axis: int | None, powers: int) -> None:
        measurements.add(x, unit_axis=unit_axis, powers=powers)

    def finish() -> None:
        nonlocal measurements
        measurements.finish()
        measurements = Measurements()

    print(f"\n{megabytes} MB, share of a copy\n{'':37}", *(f"{values:>13}" for values in VALUES))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        made = torch.randn(megabytes * 2**20 // dtype.itemsize, device=device)
        by_values = {name: change(made).to(dtype) for name, change in VALUES.items()}
        target = torch.empty_like(by_values["ordinary"])
        copy_s = time_of(partial(target.copy_, by_values["ordinary"]), device, rounds)
        copy = 2 * target.nbytes / copy_s / 1e9
        name = str(dtype).removeprefix("torch.")
        print(f"{name}, a copy moves {copy:.0f} GB/s")
        for layout, (axes, powers) in LAYOUTS.items():
            shares = {}
            for values, flat in by_values.items():
                x = flat[: flat.numel() // torch.Size(axes).numel() * torch.Size(axes).numel()]
                x = x.view(-1, *axes)
                measure = partial(add, x, unit_axis=1 if axes else None, powers=powers)
                seconds = time_of(measure, device, rounds, after=finish)
                shares[values] = x.nbytes / seconds / 1e9 / copy
            rows.append({"dtype": name, "layout": layout, "copy_gb_per_s": copy, "shares": shares})
            print(f"{name:10}{layout:27}", *(f"{share:13.1%}" for share in shares.values()))
    return rows


def time_of(
    work: Callable[[], object],
    device: torch.device,
    rounds: int,
    after: Callable[[], object] = lambda: None,
) -> float:
    """Median seconds that the device takes for it; the first round does not count."""
    times: list[float] = []
    for _ in range(rounds + 1):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(5_000_000)  # so that the host is ahead
            begin.record()
        began = time.perf_counter()
        for _ in range(REPEATS):
            work()
        times.append(time.perf_counter() - began)
        if device.type == "cuda":
            end.record()
            end.synchronize()
            times[-1] = begin.elapsed_time(end) * 1e-3
        after()
    return statistics.median(times[1:]) / REPEATS


# --- the host

CHAINED = 20  # few enough that the device's queue takes all of a step


def measure_host(device: torch.device, rounds: int) -> dict[str, float]:
    """Microseconds by which a step of small tensors keeps the host longer with the logger."""

    def chain() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 32), *(nn.Tanh() for _ in range(CHAINED - 1))).to(device)

    def times_of(model: nn.Module, optimizer: Optimizer) -> tuple[float, float, float]:
        optimizer.zero_grad()
        synchronize(device)
        times = [time.perf_counter()]
        loss = model(inputs).sum()
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        forward, backward, end = (b - a for a, b in pairwise(times))
        return forward / CHAINED * 1e6, backward / CHAINED * 1e6, end * 1e6

    inputs = torch.randn(32, 32, device=device)
    bare, logged = chain(), chain()
    optimizers = [torch.optim.Adam(model.parameters(), fused=True) for model in (bare, logged)]
    pairs = []
    with (
        tempfile.TemporaryDirectory() as folder,
        telemetry.HookLogger(logged, folder, every_n_steps=1) as logger,
    ):
        for _ in range(rounds + 3):
            pairs.append((times_of(bare, optimizers[0]), times_of(logged, optimizers[1])))
            logger.flush()
    names = ("output_us", "output_gradient_us", "optimizer_step_us")
    added = {
        name: statistics.median(b[place] - a[place] for a, b in pairs[3:])
        for place, name in enumerate(names)
    }
    print(
        f"\nThe host, more than without the logger: {added['output_us']:.1f} µs for each output, "
        f"{added['output_gradient_us']:.1f} µs for each gradient of one, "
        f"{added['optimizer_step_us']:.0f} µs for the optimizer's step, with two parameters"
    )
    return added


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: figures are rough")
    parser.add_argument("--only", nargs="*", help="parts whose names contain one of these")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    parser.add_argument("--device", default="cuda", type=torch.device)
    args = parser.parse_args()
    device = args.device
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu runs all of it small, to test this program")
    print(f"{describe_machine(device)}\n{telemetry.native}")
    rounds, seconds, megabytes = (2, 10, 128) if args.quick else (10, 45, 256)
    on_gpu = device.type == "cuda"
    if not on_gpu:
        print("NOT ON A GPU: small models, to test this program. The figures mean nothing.")
        rounds, seconds, megabytes = 1, 0, 1
    parts: dict[str, Callable[[], Any]] = {
        workload.name: partial(measure_training, workload, device, rounds, seconds)
        for workload in workloads(small=not on_gpu)
    }
    parts["bandwidth"] = partial(measure_bandwidth, device, megabytes, rounds)
    parts["host"] = partial(measure_host, device, 10 * rounds)
    figures: dict[str, Any] = {}
    failed = False
    for name, part in parts.items():
        if not args.only or any(part_of_name in name for part_of_name in args.only):
            try:
                figures[name] = part()
            except Exception:  # the others are worth having
                failed = True
                traceback.print_exc()
            sys.stdout.flush()
            if args.json:
                write_json(args.json, device, on_gpu=on_gpu, figures=figures)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

"""What recording costs: training steps with and without it, interleaved in one process.

    python benchmarks/overhead.py [--quick] [--device cuda] [--threads N] [--json FILE]

Blocks of a few steps of every variant follow each other in random order, round after round, each
on its own copy of the model; the table gives medians. A block ends when all that it recorded is
written. "added" is wall time, "CPU added" the CPU time of all threads, which other programs disturb
less.

"not due" is a step with the logger attached that is not to be measured in full. "every 100 steps"
is put together from 99 of these and one of "every step".
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter

from telemetry import HookLogger

# --- what is trained


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with one batch of random data."""

    name: str
    model: Callable[[], nn.Module]
    inputs: Callable[[], Tensor]
    classes: int
    block_steps: int


def mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def resnet18() -> nn.Module:
    """As is usual for images of CIFAR's size: a small first convolution, no pooling after it."""
    model: nn.Module = torchvision.models.resnet18(num_classes=10)
    model.conv1 = nn.Conv2d(3, 64, kernel_size=3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    return model


class GPT(nn.Module):
    """Four pre-norm layers of width 128, 256 tokens."""

    def __init__(
        self, width: int = 128, depth: int = 4, tokens: int = 256, length: int = 128
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.position = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.Sequential(*(GPTBlock(width) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(tokens) + self.position)))
        return logits


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3 * self.heads, -1).transpose(1, 2)
        q, k, v = qkv.chunk(3, dim=1)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x.add(self.mlp(self.norm2(x)))


WORKLOADS = [
    Workload(
        name="MNIST CNN, batch 64",
        model=mnist_cnn,
        inputs=lambda: torch.randn(64, 1, 28, 28),
        classes=10,
        block_steps=20,
    ),
    Workload(
        name="GPT, 4 layers of 128, batch 16 × 128 tokens",
        model=GPT,
        inputs=lambda: torch.randint(256, (16, 128)),
        classes=256,
        block_steps=4,
    ),
    Workload(
        name="ResNet-18, batch 32 × 3 × 32 × 32",
        model=resnet18,
        inputs=lambda: torch.randn(32, 3, 32, 32),
        classes=10,
        block_steps=2,
    ),
]

# --- how it is recorded


@dataclass(frozen=True, kw_only=True)
class Recording:
    """What a variant does besides training."""

    after_step: Callable[[], None] = lambda: None
    finish: Callable[[], None] = lambda: None  # waits until all of it is written


def record_nothing(model: nn.Module, log_dir: Path) -> Recording:
    return Recording()


def record_every_step(model: nn.Module, log_dir: Path) -> Recording:
    return Recording(finish=HookLogger(model, log_dir, every_n_steps=1).flush)


def record_every_step_without_images(model: nn.Module, log_dir: Path) -> Recording:
    """The content of :func:`record_naively`, and more."""
    return Recording(finish=HookLogger(model, log_dir, every_n_steps=1, images=False).flush)


def record_none_of_these_steps(model: nn.Module, log_dir: Path) -> Recording:
    """Attached, but after step 0 no step is due."""
    return Recording(finish=HookLogger(model, log_dir, every_n_steps=1_000_000).flush)


def record_naively(model: nn.Module, log_dir: Path) -> Recording:
    """``add_histogram`` of the same tensors, as tutorials show it; no images, no alerts."""
    writer = SummaryWriter(str(log_dir))
    step = 0

    def observe(name: str, output: Tensor) -> None:
        writer.add_histogram(f"activation/{name}", output.detach(), step)
        output.register_hook(
            lambda grad: writer.add_histogram(f"activation_grad/{name}", grad, step)
        )

    for name, module in model.named_modules():
        if not any(module.children()):
            module.register_forward_hook(lambda _, __, output, name=name: observe(name, output))

    def after_step() -> None:
        nonlocal step
        for name, parameter in model.named_parameters():
            writer.add_histogram(f"weight/{name}", parameter.detach(), step)
            writer.add_histogram(f"grad/{name}", parameter.grad, step)
        step += 1

    return Recording(after_step=after_step, finish=writer.flush)


VARIANTS: Mapping[str, Callable[[nn.Module, Path], Recording]] = {
    "bare": record_nothing,
    "not due": record_none_of_these_steps,
    "every step": record_every_step,
    "same, no images": record_every_step_without_images,
    "add_histogram": record_naively,
}

# --- measuring


@dataclass(frozen=True, kw_only=True)
class Block:
    """Time of one block of steps, per step, in milliseconds."""

    wall_ms: float
    cpu_ms: float


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one training step under a variant; medians over the rounds.

    Attributes:
        wall_ms: Wall time in milliseconds.
        added: Wall time over that of the bare step in the same round, less 1.
        cpu_added: The same for the CPU time of all threads.
    """

    wall_ms: float
    added: float
    cpu_added: float


class Training:
    """One model in training under one variant."""

    def __init__(
        self, workload: Workload, variant: str, device: torch.device, folder: Path
    ) -> None:
        torch.manual_seed(0)
        self._steps = workload.block_steps
        self._inputs = workload.inputs().to(device)
        self._model = workload.model().to(device)
        with torch.no_grad():
            outputs = self._model(self._inputs)
        self._labels = torch.randint(workload.classes, outputs.shape[:-1], device=device)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-3, momentum=0.9)
        self._recording = VARIANTS[variant](self._model, folder)
        self._train(steps=1)  # step 0

    def run_block(self) -> Block:
        self._train(steps=1)  # brings memory and caches to what this variant leaves
        wall, cpu = time.perf_counter(), time.process_time()
        self._train(self._steps)
        return Block(
            wall_ms=(time.perf_counter() - wall) * 1e3 / self._steps,
            cpu_ms=(time.process_time() - cpu) * 1e3 / self._steps,
        )

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            logits = self._model(self._inputs).flatten(0, -2)
            nn.functional.cross_entropy(logits, self._labels.flatten()).backward()
            self._optimizer.step()
            self._recording.after_step()
        if self._inputs.is_cuda:
            torch.cuda.synchronize()
        self._recording.finish()

    def has_module_hooks(self) -> bool:
        return any(
            module._forward_hooks
            or module._forward_pre_hooks
            or module._backward_hooks
            or module._backward_pre_hooks
            for module in self._model.modules()
        )


def measure(workload: Workload, device: torch.device, rounds: int) -> dict[str, Cost]:
    """Cost of a step under each variant, and of logging every 100th."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = {
            name: Training(workload, name, device, Path(folder) / name) for name in VARIANTS
        }
        if trainings["not due"].has_module_hooks():
            raise RuntimeError("there are hooks on the modules though no step is due")
        runs = []
        for _ in range(rounds):
            order = random.sample(list(trainings), len(trainings))
            runs.append({name: trainings[name].run_block() for name in order})
    costs = {
        name: Cost(
            wall_ms=statistics.median(run[name].wall_ms for run in runs),
            added=statistics.median(run[name].wall_ms / run["bare"].wall_ms for run in runs) - 1,
            cpu_added=statistics.median(run[name].cpu_ms / run["bare"].cpu_ms for run in runs) - 1,
        )
        for name in VARIANTS
    }
    idle, logged = costs["not due"], costs["every step"]
    costs["every 100 steps"] = Cost(
        wall_ms=0.99 * idle.wall_ms + 0.01 * logged.wall_ms,
        added=0.99 * idle.added + 0.01 * logged.added,
        cpu_added=0.99 * idle.cpu_added + 0.01 * logged.cpu_added,
    )
    return costs


# --- telling


def describe_machine(device: torch.device) -> str:
    accelerator = f", {torch.cuda.get_device_name(device)}" if device.type == "cuda" else ""
    return (
        f"{cpu_name()} ({os.cpu_count()} cores){accelerator}, {torch.get_num_threads()} torch "
        f"threads, Python {platform.python_version()}, torch {torch.__version__}, "
        f"tensorboard {version('tensorboard')}"
    )


def cpu_name() -> str:
    """What the processor calls itself; the architecture where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(": ")[2] for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def print_table(workload: Workload, costs: Mapping[str, Cost]) -> None:
    print(f"\n{workload.name}\n{'':20}{'ms per step':>14}{'added':>12}{'CPU added':>12}")
    for name, cost in costs.items():
        print(f"  {name:18}{cost.wall_ms:14.2f}{cost.added:12.1%}{cost.cpu_added:12.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rounds: figures are rough")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, help="of torch; its own default if not given")
    parser.add_argument("--json", type=Path, help="write the figures to this file, too")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    machine = describe_machine(device)
    print(machine)
    results = {}
    for workload in WORKLOADS:
        results[workload.name] = measure(workload, device, rounds=3 if args.quick else 25)
        print_table(workload, results[workload.name])
    if args.json:
        figures = {n: {v: asdict(c) for v, c in costs.items()} for n, costs in results.items()}
        args.json.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2))


if __name__ == "__main__":
    main()

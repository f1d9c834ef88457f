"""Two small models, a loop that trains them, and readers of the runs that it leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import Alert, HookLogger, StepRecord
from telemetry.tag_names import plain
from tests.helpers.known_runs import alert_at


def small_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * 6 * 6, 5),
    )


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def batches(
    model: nn.Module, logger: HookLogger | None = None, steps: int = 5, lr: float = 0.01
) -> Iterator[Tensor]:
    """Train on images if the model starts with a convolution, else on three features."""
    optimizer = torch.optim.Adam(model.parameters(), lr)
    is_cnn = isinstance(next(model.children(), None), nn.Conv2d)
    for _ in range(steps):
        inputs = torch.rand(8, 1, 8, 8) if is_cnn else torch.rand(8, 3)
        loss = F.cross_entropy(model(inputs), torch.randint(0, 2, (8,)))
        optimizer.zero_grad()
        loss.backward()
        if logger is not None:
            logger.log(loss=loss)
        optimizer.step()
        yield loss


def train(model: nn.Module, steps: int = 5, **options: Any) -> None:
    finish(batches(model, steps=steps, **options))


def finish(iterator: Iterator[object]) -> None:
    for _ in iterator:
        pass


def fault_at(*steps: int) -> Callable[[StepRecord], Iterable[Alert]]:
    """A rule that reports an error in module 0 at these steps."""

    def rule(record: StepRecord) -> Iterator[Alert]:
        if record.step in steps:
            yield alert_at(
                record.step,
                "0",
                kind="nonfinite",
                summary="planted fault in module 0",
                advice=("try to remove it",),
            )

    return rule


def hook_count(model: nn.Module) -> int:
    """Return how many kinds of hooks are on modules, and how many parameters have some."""
    on_modules = sum(
        bool(hooks)
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "hooks" in name
    )
    return on_modules + sum(
        bool(p._backward_hooks or p._post_accumulate_grad_hooks) for p in model.parameters()
    )


def is_hooked(model: nn.Module) -> bool:
    return hook_count(model) > 0


class EventAccumulator(event_accumulator.EventAccumulator):
    """TensorBoard's own reader; tags are as they are without the groups of ours."""

    def Tags(self) -> dict[str, Any]:  # noqa: N802 - overrides
        tags = super().Tags()
        return {k: [*map(plain, v)] if isinstance(v, list) else v for k, v in tags.items()}

    def Scalars(self, tag: str) -> Any:  # noqa: N802
        return super().Scalars(self._written("scalars", tag))

    def Tensors(self, tag: str) -> Any:  # noqa: N802
        return super().Tensors(self._written("tensors", tag))

    def SummaryMetadata(self, tag: str) -> Any:  # noqa: N802
        return super().SummaryMetadata(self._written("tensors", tag))

    def _written(self, kind: str, tag: str) -> str:
        return next((full for full in super().Tags()[kind] if plain(full) == tag), tag)


def load(log_dir: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(log_dir), size_guidance={"tensors": 0, "scalars": 0})
    return accumulator.Reload()


def scalars(log_dir: Path, tag: str = "grad_norm/total") -> dict[int, float]:
    """One curve as TensorBoard shows it; by default the one that has each step."""
    return {event.step: event.value for event in load(log_dir).Scalars(tag)}


def written(log_dir: Path) -> Iterator[tuple[Path, int, Any]]:
    """Yield file, step and value of everything in the event files, also what readers hide."""
    for path in sorted(log_dir.glob("*tfevents*"), key=lambda path: path.stat().st_ctime_ns):
        for event in LegacyEventFileLoader(str(path)).Load():
            for value in event.summary.value:
                yield path, event.step, value


def measured_steps(log_dir: Path) -> list[int]:
    """Return the steps at which the whole model was measured."""
    layers = telemetry.read(log_dir).layers
    return sorted(set(layers[layers.statistic == "weight_rms"].step.tolist()))

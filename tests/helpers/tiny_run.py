"""One small layer that trains with a logger, and what the event files of a directory contain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from torch import nn

import telemetry
from telemetry import HookLogger


class TinyRun:
    """A model, its optimizer and its logger, which has no rules and measures step 0 alone."""

    def __init__(self, writer: Any, **options: Any) -> None:
        self.model = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        options = {"every_n_steps": 10**9, "alerts": (), "measure": "!images", **options}
        options = {"max_overhead": math.inf, "loss_tag": "count", **options}
        self.logger = HookLogger(self.model, writer, **options)

    def train(self, steps: int = 1, **scalars: float) -> None:
        """Train, and log each step's number as ``count``."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(torch.ones(4, 2)).square().mean().backward()
            self.logger.log(count=self.logger.current_step, **scalars)
            self.optimizer.step()


def whole_run(
    writer: Any, steps: int = 1, scalars: Mapping[str, float] | None = None, **options: Any
) -> TinyRun:
    """Train these steps and close the logger."""
    run = TinyRun(writer, **options)
    run.train(steps, **(scalars or {}))
    run.logger.close()
    return run


def event_files(log_dir: Path) -> list[Path]:
    """Return the event files in the order in which TensorBoard reads them."""
    return sorted(log_dir.glob("*tfevents*"))


def events_of(path: Path) -> Iterator[Event]:
    """Yield the events as they are in the file; a torn or damaged end is omitted."""
    return map(Event.FromString, RawEventFileLoader(str(path)).Load())


def steps_of(path: Path, tag: str = "count") -> list[int]:
    """Return the steps at which the file has a value of the tag."""
    return [e.step for e in events_of(path) if any(v.tag == tag for v in e.summary.value)]


def norm_steps(log_dir: Path) -> list[int]:
    """Return the steps with gradient norms in the run log, if it has the layout that they need."""
    layers = telemetry.read(log_dir).layers
    return sorted(layers[layers.statistic == "grad_norm"].step)


def steps_by_file(log_dir: Path, tag: str = "count") -> list[list[int]]:
    return [steps_of(path, tag) for path in event_files(log_dir)]

"""Small training runs with known faults, which save checkpoints and resume from them.

Run by test_resume.py to resume in a fresh process: ``interrupted_runs.py CHECKPOINT LOG_DIR ...``
prints the alerts that come after each checkpoint.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from telemetry import HookLogger
from telemetry.rule import AnyRule

STEPS = 70


@dataclass(frozen=True)
class Moment:
    """A step that is about to begin, and its batch."""

    step: int
    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    inputs: Tensor


def grow_weights(at: Moment) -> None:
    if at.step == 40:
        with torch.no_grad():
            at.model[4].weight.mul_(500)


def spoil_batch(at: Moment) -> None:
    if at.step == 33:
        at.inputs.fill_(math.nan)


def raise_rate(at: Moment) -> None:
    at.optimizer.param_groups[0]["lr"] = 10.0 if at.step >= 40 else 0.05


def close_relus(at: Moment) -> None:
    if at.step == 30:
        nn.init.constant_(at.model[2].bias, -50)
    if at.step == 50:  # and the fault is over
        nn.init.constant_(at.model[2].bias, 0.5)


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run, the steps before which it saves a checkpoint, and the layers of its alerts by kind."""

    checkpoints: Sequence[int] = ()
    alerts: Mapping[str, str | None] = field(default_factory=dict)
    depth: int = 4
    activation: type[nn.Module] = nn.ReLU
    gain: float = 2**0.5
    lr: float = 0.05
    disturb: Callable[[Moment], object] = lambda at: None

    def model(self) -> nn.Sequential:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for width_in in [64] + [48] * (self.depth - 1):
            linear = nn.Linear(width_in, 48)
            nn.init.normal_(linear.weight, std=self.gain / width_in**0.5)
            nn.init.zeros_(linear.bias)
            layers += [linear, self.activation()]
        return nn.Sequential(*layers, nn.Linear(48, 10))


RUNS = {
    "healthy": Run(checkpoints=(3, 47)),
    "exploding": Run(
        checkpoints=(38, 41, 45), disturb=grow_weights,
        alerts={"weight_jump": "4", "exploding_gradient": "4"},
    ),
    "vanishing": Run(
        checkpoints=(1, 2, 25), depth=12, activation=nn.Sigmoid, gain=1.0,
        alerts={"vanishing_gradient": "0"},
    ),
    "nonfinite": Run(checkpoints=(30, 34, 50), disturb=spoil_batch, alerts={"nonfinite": None}),
    "dead": Run(checkpoints=(31, 35, 52, 60), disturb=close_relus, alerts={"dead_units": "2"}),
    "saturated": Run(
        checkpoints=(1, 25), activation=nn.Tanh, gain=60.0, alerts={"saturated_units": "1"}
    ),
    "diverging": Run(
        checkpoints=(38, 41, 43, 60), disturb=raise_rate, alerts={"loss_spike": None}
    ),
    "not_learning": Run(checkpoints=(12, 25, 45), lr=1e-9, alerts={"no_learning": None}),
}  # fmt: skip


def digits() -> tuple[Tensor, Tensor]:
    """Images of 64 pixels, and their classes."""
    data = load_digits()
    return torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)


def train(
    run: Run,
    log_dir: Path,
    *,
    checkpoint: dict[str, Any] | None = None,
    with_state: bool = True,
    rules: Sequence[AnyRule] | None = None,
) -> tuple[list[list[object]], dict[int, dict[str, Any]]]:
    """Return alerts and checkpoints from a checkpoint on; each step is judged at once."""
    images, labels = digits()
    model = run.model()
    optimizer = torch.optim.SGD(model.parameters(), run.lr, momentum=0.9)
    first = 0
    if checkpoint is not None:
        first = checkpoint["step"]
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    checkpoints = {}
    first_step = 0 if with_state else first
    with HookLogger(
        model, log_dir, every_n_steps=10, measure="!images", alerts=rules, first_step=first_step
    ) as logger:
        if checkpoint is not None and with_state:
            logger.load_state_dict(checkpoint["logger"])
        for step in range(first, STEPS):
            if checkpoint is None and step in run.checkpoints:
                checkpoints[step] = {
                    "step": step,
                    "model": deepcopy(model.state_dict()),
                    "optimizer": deepcopy(optimizer.state_dict()),
                    "logger": logger.state_dict(),
                }
            batch = torch.randint(
                0, len(images), (32,), generator=torch.Generator().manual_seed(step)
            )
            inputs = images[batch]
            run.disturb(Moment(step, model, optimizer, inputs))
            loss = F.cross_entropy(model(inputs), labels[batch])
            logger.log(loss=loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            logger.flush()
        return [list(asdict(alert).values()) for alert in logger.alerts], checkpoints


def resume(checkpoints: Path, log_dir: Path) -> None:
    """Print the alerts after each checkpoint; of the healthy run also without the saved state."""
    saved = torch.load(checkpoints, weights_only=True)
    alerts = {
        f"{name} {step} {with_state}": train(
            RUNS[name],
            log_dir / f"{name}-{step}-{with_state}",
            checkpoint=checkpoint,
            with_state=with_state,
        )[0]
        for name, by_step in saved.items()
        for step, checkpoint in by_step.items()
        for with_state in ((True, False) if name == "healthy" else (True,))
    }
    print(json.dumps(alerts))


if __name__ == "__main__":
    resume(Path(sys.argv[1]), Path(sys.argv[2]))

"""Training loops on the model's device, which never block on it.

A default device would do for the inputs, but optimizers and scalers make numbers for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from telemetry import HookLogger
from tests.helpers.twins import Loop
from tests.unit.run.test_logger import small_cnn


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 2))


class Checkpointed(nn.Module):
    """Its first part runs again in the backward pass."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 6), nn.Linear(6, 2)
        self.block = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.3))
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.block, self.embed(x), use_reentrant=self.use_reentrant)
        return self.head(x)


def device_of(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def loss_of(model: nn.Module, *shape: int) -> Tensor:
    device = device_of(model)
    inputs, labels = torch.rand(8, *shape, device=device), torch.randint(0, 2, (8,), device=device)
    return F.cross_entropy(model(inputs), labels)


def step_of(model: nn.Module) -> Tensor:
    loss = loss_of(model, 4)
    loss.backward()
    return loss


def pictures(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(5):
        loss = loss_of(model, 1, 8, 8)
        optimizer.zero_grad()
        loss.backward()
        if logger is not None:
            logger.log(loss=loss)
        optimizer.step()
        yield loss


def plain(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        yield step_of(model)
        optimizer.step()


def accumulating(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    """Clipped gradients of two micro-batches; the learning rate is a tensor that changes."""
    device = device_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=device.type != "cpu")
    optimizer.param_groups[0]["lr"] = rate = torch.full((), 0.1, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss = step_of(model)
            if logger is not None:
                logger.log(loss=loss)
            yield loss
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        rate.mul_(0.5)


def scaled(
    model: nn.Module, logger: HookLogger | None, *, autocast: bool, **options: bool
) -> Iterator[Tensor]:
    device_type = device_of(model).type
    scaler = torch.amp.GradScaler(device_type, init_scale=1024.0, growth_interval=2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, **options)
    lower: Callable[[], AbstractContextManager[object]]
    lower = partial(torch.autocast, device_type, torch.float16) if autocast else nullcontext
    for _ in range(4):
        optimizer.zero_grad()
        with lower():
            loss = loss_of(model, 4)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        yield loss


def validating(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    for loss in plain(model, logger):
        yield loss
        with logger.phase("validation") if logger is not None else nullcontext(), torch.no_grad():
            model(torch.rand(8, 4, device=device_of(model)))


LOOPS: dict[str, tuple[Callable[[], nn.Module], Loop]] = {
    "CNN": (small_cnn, pictures),
    "accumulation and clipping": (mlp, accumulating),
    "GradScaler": (mlp, partial(scaled, autocast=False)),
    "checkpointing": (partial(Checkpointed, False), plain),
    "reentrant checkpointing": (partial(Checkpointed, True), plain),
    "validation": (mlp, validating),
}


def guarded(loop: Loop, guard: Callable[[], AbstractContextManager[object]]) -> Loop:
    """The same loop, within a guard except when it has yielded."""

    def run(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        values = iter(loop(model, logger))
        end = object()
        while True:
            with guard():
                value = next(values, end)
            if value is end:
                return
            yield value

    return run


def skip_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep GradScaler from reading whether gradients are finite, for which it waits."""

    def step(scaler: object, optimizer: Optimizer, state: object, *args: Any) -> Any:
        return optimizer.step(*args)

    monkeypatch.setattr(torch.amp.GradScaler, "_maybe_opt_step", step)

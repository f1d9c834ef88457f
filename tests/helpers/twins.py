"""Two runs of one training loop, bare and watched: they must not differ in a single bit."""

from __future__ import annotations

import gc
import io
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from telemetry import Alert, HookLogger, StepRecord
from telemetry.testing import capture_run

Loop = Callable[[nn.Module, "HookLogger | None"], Iterable[object]]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def batch() -> Tensor:
    return torch.randn(6, 4)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Tensor:
    return model(batch() if x is None else x).square().mean()


def training(
    loss_of: Callable[[Any], Tensor] = loss_of, steps: int = 3, optimizer: Any = None
) -> Loop:
    """A loop that yields the loss of each step; ``optimizer``: makes one, of the parameters."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        made = (optimizer or partial(torch.optim.SGD, lr=0.1, momentum=0.9))(model.parameters())
        for _ in range(steps):
            made.zero_grad()
            loss = loss_of(model)
            loss.backward()
            made.step()
            yield loss

    return loop


def scaled_loop(
    optimizer: Callable[..., torch.optim.Optimizer],
    *,
    overflow_at: tuple[int, ...] = (),
    iterations: int = 6,
    clip: float | None = None,
    micro_batches: int = 1,
    scale: float = 1024.0,
    enabled: bool = True,
) -> Loop:
    """Training with a scaler; iterations ``overflow_at`` have infinite gradients."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        made = optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2, enabled=enabled)
        for iteration in range(iterations):
            made.zero_grad()
            for number in range(micro_batches):
                loss = model(batch()).square().mean() / micro_batches
                if iteration in overflow_at and number == micro_batches - 1:
                    loss = loss * 1e38
                scaler.scale(loss).backward()
            if clip is not None:
                scaler.unscale_(made)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(made)
            scaler.update()
            yield loss

    return loop


def descend(
    model: nn.Module, x: Tensor, *optimizers: torch.optim.Optimizer, steps: int = 1
) -> None:
    """Minimize the mean square of the output for these inputs, by SGD if no optimizer is given."""
    optimizers = optimizers or (torch.optim.SGD(model.parameters(), lr=0.1),)
    for _ in range(steps):
        model.zero_grad()
        loss_of(model, x).backward()
        for optimizer in optimizers:
            optimizer.step()


def one_step(model: nn.Module, *batches: Any, **options: Any) -> StepRecord:
    """Train one step on some micro-batches; ``options``: of ``capture_run``."""
    with capture_run(model, **options) as run:
        for inputs in batches:
            loss_of(model, inputs).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return run.records[0]


class Recorder:
    """A rule that finds nothing and keeps every record."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.records.append(record)
        return ()


class Blocked:
    """A rule that finds nothing, and judges no step before a test permits it."""

    def __init__(self) -> None:
        self.entered, self.may_judge = Event(), Event()

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        self.entered.set()
        assert self.may_judge.wait(120)  # a watchdog; decides no test
        return ()


@dataclass
class Outcome:
    """Results of a run of a loop."""

    model: nn.Module
    yielded: list[Any]
    random_numbers: tuple[float, float, float]
    records: list[StepRecord] = field(default_factory=list)

    @property
    def full(self) -> list[StepRecord]:
        return [record for record in self.records if record.full]


def run(make: Callable[[], nn.Module], loop: Loop, log_dir: Path | None, **options: Any) -> Outcome:
    """Train ``make()`` by ``loop``, watched if there is a ``log_dir``.

    The loop yields the values to compare (losses, gradients); tensors are copied.
    """
    seed(0)
    model = make()
    seed(1)
    if log_dir is None:
        yielded = [_copy(value) for value in loop(model, None)]
        return Outcome(model, yielded, draw())
    recorder = Recorder()
    options = {"every_n_steps": 1, "alerts": [recorder], **options}
    with HookLogger(model, log_dir, **options) as logger:
        yielded = [_copy(value) for value in loop(model, logger)]
        numbers = draw()
    return Outcome(model, yielded, numbers, recorder.records)


def assert_left_alone(
    make: Callable[[], nn.Module], loop: Loop, log_dir: Path, **options: Any
) -> Outcome:
    """Run twins and compare them bit for bit; return the outcome of the watched one."""
    bare, watched = run(make, loop, None), run(make, loop, log_dir, **options)
    assert bare.random_numbers == watched.random_numbers
    assert len(bare.yielded) == len(watched.yielded)
    for expected, got in zip(bare.yielded, watched.yielded, strict=True):
        assert_same(expected, got)
    for (name, expected), got in zip(
        bare.model.state_dict().items(), watched.model.state_dict().values(), strict=True
    ):
        assert_same(expected, got, name)
    for (name, parameter), twin in zip(
        bare.model.named_parameters(), watched.model.parameters(), strict=True
    ):
        assert_same(parameter.grad, twin.grad, f"{name}.grad")
    return watched


def of_ours() -> set[int]:
    """Return the identities of all live objects that watch a model."""
    gc.collect()
    ours = ("telemetry.capture", "telemetry.run")
    return {id(o) for o in gc.get_objects() if str(type(o).__module__).startswith(ours)}


def assert_same(expected: object, got: object, name: str = "") -> None:
    """Equal to the bit, NaN included."""
    if isinstance(expected, Tensor):
        assert isinstance(got, Tensor), name
        if expected.is_sparse:
            expected, got = expected.coalesce().to_dense(), got.coalesce().to_dense()
        assert torch.equal(expected.isnan(), got.isnan()), name
        assert torch.equal(expected.nan_to_num(0), got.nan_to_num(0)), name
    else:
        assert expected == got or (expected != expected and got != got), name


def seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002 - the global stream is compared
    random.seed(number)


def draw() -> tuple[float, float, float]:
    """The next number of each global stream."""
    return torch.rand(()).item(), float(np.random.rand()), random.random()  # noqa: NPY002


def _copy(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def by_pickle(model: nn.Module) -> nn.Module:
    """A copy of a model by ``pickle``."""
    return pickle.loads(pickle.dumps(model))


def by_saving(model: nn.Module) -> nn.Module:
    """A copy of a model that was saved whole."""
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)

"""A logger with a budget: what it costs is told, and it measures what it can afford."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plain_events import EventAccumulator
from torch import Tensor, nn
from torch.nn import functional as F
from twins import Recorder, assert_left_alone

from telemetry import HookLogger
from telemetry.budget import Budget
from telemetry.capture import reader
from telemetry.capture.costs import StepCosts
from telemetry.capture.light import LightReader
from telemetry.measure import Measurer

BARE_STEP_S = 1.0
DEVICE = torch.device("cuda")


class Clock:
    """Stands for :mod:`time`; passes only where a test says so."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self.trained_s = 0.0

    def thread_time(self) -> float:
        return self.own_s

    def perf_counter(self) -> float:
        return self.own_s + self.trained_s

    def slowed(self, function: Callable[..., Any], by_s: float) -> Callable[..., Any]:
        """The same function, which takes longer."""

        def slow(*args: Any) -> Any:
            self.own_s += by_s
            return function(*args)

        return slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """On which each tensor that is measured takes 0.1 s, and each call for norms 1 ms."""
    clock = Clock()
    monkeypatch.setattr("telemetry.budget.time", clock)
    # Wall time comes from elsewhere, too.
    wall = SimpleNamespace(perf_counter=clock.perf_counter)
    monkeypatch.setattr("telemetry.capture.costs.time", wall)
    add, add_plain, add_all = Measurer.add, Measurer.add_plain, Measurer.add_all

    def slow_add(measurer: Measurer, tensor: Tensor, **asked: Any) -> int | None:
        before_s = clock.own_s
        index = add(measurer, tensor, **asked)
        if clock.own_s == before_s:  # else it was a plain one
            clock.own_s += 0.1
        return index

    def slow_add_plain(measurer: Measurer, tensor: Tensor, **asked: Any) -> int | None:
        index = add_plain(measurer, tensor, **asked)
        clock.own_s += 0.1 if index is not None else 0.0
        return index

    def slow_add_all(
        measurer: Measurer, tensors: Collection[Tensor], **asked: Any
    ) -> list[int | None]:
        clock.own_s += 0.1 * len(tensors)
        return add_all(measurer, tensors, **asked)

    monkeypatch.setattr(Measurer, "add", slow_add)
    monkeypatch.setattr(Measurer, "add_plain", slow_add_plain)
    monkeypatch.setattr(Measurer, "add_all", slow_add_all)
    return clock


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def train(
    model: nn.Module,
    clock: Clock | None = None,
    steps: int = 100,
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
) -> Iterator[Tensor]:
    optimizer = make_optimizer(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(torch.rand(8, 4)), torch.rand(8, 4))
        loss.backward()
        if clock is not None:
            clock.trained_s += BARE_STEP_S
        optimizer.step()
        yield loss


def run(log_dir: Path, clock: Clock, *, steps: int, **options: Any) -> Recorder:
    recorder = Recorder()
    model = deep()
    with HookLogger(model, log_dir, alerts=[recorder], images=False, **options):
        for _ in train(model, clock, steps):
            pass
    return recorder


def scalars(log_dir: Path, tag: str) -> list[tuple[int, float]]:
    accumulator = EventAccumulator(str(log_dir), {"tensors": 0, "scalars": 0})
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(tag)]


def test_the_interval_is_stretched_to_stay_within_the_budget(tmp_path: Path, clock: Clock) -> None:
    # An input, 6 outputs, 6 gradients of outputs, 12 parameters and 12 of their gradients: 3.7 s.
    recorder = run(tmp_path, clock, steps=600, every_n_steps=10, max_overhead=0.04)
    full = [record.step for record in recorder.records if record.full]
    assert full == [0, 190, 280, 380, 470, 560]  # 92.5 steps earn 3.7 s; the first is paid, too
    assert [record.step for record in recorder.records] == list(range(600))
    assert clock.own_s <= 0.04 * clock.trained_s + 3.7
    told = dict(scalars(tmp_path, "telemetry/overhead"))
    assert list(told) == full[1:]
    assert told[560] == pytest.approx(6 * 3.7 / 560)
    intervals = scalars(tmp_path, "telemetry/every_n_steps")
    assert intervals == [(0, 10.0), *((step, step - last) for last, step in pairwise(full))]


def test_layers_take_turns_and_norms_stay_complete(tmp_path: Path, clock: Clock) -> None:
    recorder = run(tmp_path, clock, steps=800, every_n_steps=1, max_overhead=0.04)
    parts = [record for record in recorder.records if record.full][3:]
    measured = Counter(name for record in parts for name in record.activations)
    assert set(measured) == {str(layer) for layer in range(6)}
    assert max(measured.values()) - min(measured.values()) <= 1
    for record in parts:
        layers = set(record.activations)
        assert len(layers) < 6
        assert set(record.activation_grads) == layers
        parameters = {f"{layer}.{name}" for layer in layers for name in ("weight", "bias")}
        assert set(record.grads) == set(record.weights) == set(record.update_ratios) == parameters
    assert all(record.grad_present.all() for record in recorder.records)
    names = [module.name for module in recorder.records[-1].layout.modules]
    assert names == [str(layer) for layer in range(6)]


def test_second_moments_take_turns_with_their_layers(tmp_path: Path, clock: Clock) -> None:
    model, recorder = deep(), Recorder()
    options = {"every_n_steps": 1, "max_overhead": 0.04, "images": False}
    with HookLogger(model, tmp_path, alerts=[recorder], **options):
        for _ in train(model, clock, 800, torch.optim.Adam):
            pass
    full = [record for record in recorder.records if record.full]
    assert len(full[-1].second_moments) < 12
    for record in full:
        assert set(record.second_moments) == set(record.weights)


def test_norms_are_skipped_where_they_alone_take_too_much(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((reader, "take_norms"), (LightReader, "read")):
        monkeypatch.setattr(owner, name, clock.slowed(getattr(owner, name), 0.2))
    recorder = run(tmp_path, clock, steps=1000, every_n_steps=10, max_overhead=0.04)
    light = [record for record in recorder.records if not record.full]
    assert len(light) == pytest.approx(1000 * 0.02 / 0.2, rel=0.05)
    assert all(record.grad_present.all() for record in light)
    assert len(light) < len(recorder.records) < 200


def test_what_the_budget_did_is_said_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="telemetry"):
        run(tmp_path, clock, steps=600, every_n_steps=10, max_overhead=0.04)
    said = [message for message in caplog.messages if "max_overhead=0.04" in message]
    assert said == [
        "telemetry: to stay within max_overhead=0.04: measuring about every 190 steps instead "
        "of every 10"
    ]


def test_without_a_budget_nothing_is_timed(tmp_path: Path, clock: Clock) -> None:
    recorder = run(tmp_path, clock, steps=20, every_n_steps=2)
    assert sum(record.full for record in recorder.records) == 10
    with pytest.raises(KeyError):
        scalars(tmp_path, "telemetry/overhead")


def test_training_is_left_alone_under_a_budget(tmp_path: Path) -> None:
    outcome = assert_left_alone(
        deep, lambda model, logger: train(model), tmp_path, max_overhead=0.05
    )
    assert outcome.full


def test_time_between_remove_and_attach_is_no_steps(tmp_path: Path, clock: Clock) -> None:
    model = deep()
    with HookLogger(model, tmp_path, alerts=(), max_overhead=0.5, every_n_steps=1) as logger:
        for _ in train(model, clock, steps=3):
            pass
        logger.remove()
        clock.trained_s += 1e6
        logger.attach()
        for _ in train(model, clock, steps=3):
            pass
    steps = [step for step, _ in scalars(tmp_path, "telemetry/every_n_steps")]
    assert steps == [0]  # 3.6 s are not earned in 4 steps


class Event:
    """A CUDA event that the device comes to when told to."""

    recorded: list[Event]

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at_ms: float | None = None

    def record(self, stream: object) -> None:
        Event.recorded.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def test_on_a_gpu_steps_are_entered_when_the_device_has_come_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.recorded = []
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    entered: list[int] = []
    budget = Budget(max_overhead=0.1, every_n_steps=1)
    budget.entered = lambda _, step: entered.append(step)
    costs = StepCosts(budget)
    durations_ms = [100, 100, 100, 130, 100, 100]  # 3 is measured in full
    for step in range(len(durations_ms)):
        if step == 3:
            budget.begin_full(layers=1)
        costs.step_ended(step, full=step == 3, norms=True, device=DEVICE)
    assert entered == []
    assert not budget.affords_full()
    at_ms = 0.0
    for event, duration_ms in zip(Event.recorded, durations_ms, strict=True):
        at_ms += duration_ms
        event.at_ms = at_ms
    costs.step_ended(6, full=False, norms=True, device=DEVICE)
    assert entered == [3]
    # 30 ms more than the others, of 5 bare steps between 6 events.
    assert budget.scalars()["telemetry/overhead"] == pytest.approx(30 / 500)

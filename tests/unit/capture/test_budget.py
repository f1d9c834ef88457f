"""The budget keeps telemetry's own time within its share by stretching intervals."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from telemetry import HookLogger
from telemetry.capture import Budget
from telemetry.capture import step as step_module
from telemetry.capture.light_step import LightReader
from telemetry.measure import Measurer
from tests.helpers.plain_events import EventAccumulator
from tests.helpers.twins import Recorder, assert_left_alone

BARE_STEP_S = 1.0
DEVICE = torch.device("cuda")


class Clock:
    """Replacement of :mod:`time` that a test advances."""

    def __init__(self) -> None:
        self.own_s = 0.0
        self.trained_s = 0.0

    def thread_time(self) -> float:
        return self.own_s

    def perf_counter(self) -> float:
        return self.own_s + self.trained_s

    def slowed(self, function: Callable[..., Any], by_s: float) -> Callable[..., Any]:
        """Return a function that takes ``by_s`` longer."""

        def slow(*args: Any) -> Any:
            self.own_s += by_s
            return function(*args)

        return slow


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Clock on which each measured tensor takes 0.1 s.

    The background thread takes no time.
    """
    clock = Clock()
    monkeypatch.setattr(Budget, "worker_took", lambda self, work, seconds: None)
    monkeypatch.setattr("telemetry.capture.budget.time", clock)
    add_all = Measurer.add_all

    def slow_add_all(
        measurer: Measurer, tensors: Sequence[Tensor], **options: Any
    ) -> list[int | None]:
        clock.own_s += 0.1 * len(tensors)
        return add_all(measurer, tensors, **options)

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


@pytest.mark.slow
def test_the_interval_is_stretched_to_stay_within_the_budget(tmp_path: Path, clock: Clock) -> None:
    # An input, 6 outputs, 6 gradients of outputs, 12 parameters and 12 of their gradients: 3.7 s.
    recorder = run(tmp_path, clock, steps=600, every_n_steps=10, max_overhead=0.04)
    full = [record.step for record in recorder.records if record.full]
    assert full == [0, 190, 280, 380, 470, 560]  # 92.5 steps earn 3.7 s; the first is paid, too
    assert [record.step for record in recorder.records] == list(range(600))
    assert clock.own_s <= 0.04 * clock.trained_s + 3.7
    overheads = dict(scalars(tmp_path, "telemetry/overhead"))
    assert list(overheads) == full[1:]
    assert overheads[560] == pytest.approx(6 * 3.7 / 560)
    intervals = scalars(tmp_path, "telemetry/every_n_steps")
    assert intervals == [(0, 10.0), *((step, step - last) for last, step in pairwise(full))]


@pytest.mark.slow
def test_norms_above_the_budget_are_measured_at_every_kth_step(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, name in ((step_module, "take_norms"), (LightReader, "read")):
        monkeypatch.setattr(owner, name, clock.slowed(getattr(owner, name), 0.08))
    recorder = run(tmp_path, clock, steps=3000, every_n_steps=10, max_overhead=0.04)
    steps = [record.step for record in recorder.records]
    assert steps[:33] == list(range(33))
    light = {record.step for record in recorder.records[40:] if not record.full}
    full = [record.step for record in recorder.records if record.full]
    assert light == set(range(min(light), 3000, 3)) - set(full)  # 0.08 of 3 * 0.75 * 0.04
    assert len(full) > 3
    assert clock.own_s <= 0.04 * clock.trained_s + 3.7
    assert scalars(tmp_path, "telemetry/norms_every_n_steps")[-1] == (full[-1], 3)
    [norms] = [message for message in caplog.messages if "gradient norms" in message]
    assert norms == (
        "telemetry: to stay within max_overhead=0.04: gradient norms at one step in 3: at all of "
        "them they alone take 8.00% of the time of training; see the curve "
        "telemetry/norms_every_n_steps"
    )


@pytest.mark.slow
def test_postponed_measurements_are_logged_once(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="telemetry"):
        run(tmp_path, clock, steps=600, every_n_steps=10, max_overhead=0.04)
    assert [message for message in caplog.messages if "max_overhead" in message] == [
        "telemetry: to stay within max_overhead=0.04: measuring less often than every 10 steps (a "
        "measurement takes 3.7e+03 ms, a step 1e+03 ms); see the curve telemetry/every_n_steps"
    ]


def test_without_a_budget_no_step_is_postponed_and_no_overhead_is_written(
    tmp_path: Path, clock: Clock
) -> None:
    recorder = run(tmp_path, clock, steps=20, every_n_steps=2)
    assert sum(record.full for record in recorder.records) == 10
    with pytest.raises(KeyError):
        scalars(tmp_path, "telemetry/overhead")


def test_training_is_left_alone_under_a_budget(tmp_path: Path) -> None:
    outcome = assert_left_alone(
        deep, lambda model, logger: train(model), tmp_path, max_overhead=0.05
    )
    assert outcome.full


def test_a_failure_of_the_budget_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("broken")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with HookLogger(model, tmp_path, max_overhead=0.5, every_n_steps=1000):
        for step in range(4):
            if step == 2:  # light steps
                monkeypatch.setattr(Budget, "affords", fail)
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert "to begin a step" in caplog.text


def test_time_between_remove_and_attach_does_not_count(tmp_path: Path, clock: Clock) -> None:
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
    """CUDA event that the device reaches when a test sets ``at_ms``."""

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


@pytest.fixture
def device_events(monkeypatch: pytest.MonkeyPatch) -> None:
    Event.recorded = []
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)


@pytest.mark.usefixtures("device_events")
def test_on_a_gpu_step_times_are_recorded_when_the_device_reaches_them() -> None:
    logged: list[int] = []
    curves: dict[str, float] = {}

    def log_costs(scalars: Mapping[str, float], step: int) -> None:
        logged.append(step)
        curves.update(scalars)

    budget = Budget(max_overhead=0.1, every_n_steps=1, log_costs=log_costs)
    durations_ms = [100, 100, 100, 130, 100, 100]  # 3 is a full step
    for step in range(len(durations_ms)):
        budget.step_ended(step, full=step == 3, norms=True, device=DEVICE)
    assert logged == []
    assert budget.affords(6, full=True) == (False, True)
    at_ms = 0.0
    for event, duration_ms in zip(Event.recorded, durations_ms, strict=True):
        at_ms += duration_ms
        event.at_ms = at_ms
    budget.step_ended(6, full=False, norms=True, device=DEVICE)
    assert logged == [3]
    # 30 ms more than the others, of 3 bare steps until then.
    assert curves["telemetry/overhead"] == pytest.approx(30 / 300)
    assert budget.affords(7, full=True) == (False, True)  # 50 ms are earned, 60 would be spent


# --- the account alone, on a simulated clock -----------------------------------------------------


@dataclass(kw_only=True)
class Run:
    """Simulated run: the cost of each kind of step, in seconds."""

    clock: Clock
    bare_s: float
    full_s: float
    light_s: float = 0.0
    skipped_s: float = 0.0
    every: int = 1
    steps: int = 0
    full: list[int] = field(default_factory=list)
    norms: list[int] = field(default_factory=list)

    def train_for(self, budget: Budget, count: int) -> None:
        if not self.steps:
            budget.restart()
        for step in range(self.steps, self.steps + count):
            full, norms = budget.affords(step, full=step % self.every == 0)
            self.clock.trained_s += self.bare_s
            with budget:
                self.clock.own_s += (
                    self.full_s if full else self.light_s if norms else self.skipped_s
                )
            self.full += [step] * full
            self.norms += [step] * norms
            budget.step_ended(step, full=full, norms=norms, device=torch.device("cpu"))
        self.steps += count

    @property
    def overhead(self) -> float:
        return self.clock.own_s / self.clock.trained_s


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    def make(**costs: Any) -> Run:
        clock = Clock()
        monkeypatch.setattr("telemetry.capture.budget.time", clock)
        return Run(clock=clock, **costs)

    return make


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("light_s", [0.0, 1e-4, 1e-3])
def test_a_cnn_of_11_ms_stays_within_its_share_and_uses_it(
    simulated: Callable[..., Run], share: float, light_s: float
) -> None:
    run = simulated(bare_s=0.011, full_s=0.006, light_s=light_s, skipped_s=1e-5, every=10)
    run.train_for(Budget(max_overhead=share, every_n_steps=10), 4000)
    assert run.overhead <= share * 1.01
    affordable = 400 * 0.006 / (4000 * 0.011) + light_s / 0.011
    assert run.overhead > 0.9 * min(share, affordable)
    # A quarter of the share remains for full measurements at the least.
    later = [step for step in run.full if step >= 2000]
    assert len(later) >= min(200, 0.2 * share * 2000 * 0.011 / 0.006)
    if light_s <= 0.75 * share * 0.011:
        assert len(run.norms) == 4000
    else:
        assert len(run.norms) > 0.3 * share * 4000 * 0.011 / light_s
        distances = {later - step for step, later in pairwise(run.norms[2000:])}
        assert len(distances - {1}) <= 3  # with full steps in between


def test_cheap_measurements_run_at_the_requested_interval(
    simulated: Callable[..., Run], caplog: pytest.LogCaptureFixture
) -> None:
    run = simulated(bare_s=0.1, full_s=0.004, every=10)
    run.train_for(Budget(max_overhead=0.01, every_n_steps=10), 1000)
    assert run.full == list(range(0, 1000, 10))
    assert not caplog.records


def test_the_interval_is_stretched_no_further_than_needed(simulated: Callable[..., Run]) -> None:
    run = simulated(bare_s=0.1, full_s=0.02, every=3)  # 20 steps earn it
    run.train_for(Budget(max_overhead=0.01, every_n_steps=3), 3000)
    gaps = [after - before for before, after in pairwise(run.full)]
    assert gaps[0] == 42  # the first full step is paid, too
    assert set(gaps[1:]) <= {18, 21}
    assert run.overhead == pytest.approx(0.01, rel=0.02)


def test_norms_are_measured_at_each_step_again_once_they_are_cheap(
    simulated: Callable[..., Run],
) -> None:
    run = simulated(bare_s=0.01, full_s=0.01, light_s=3e-4, skipped_s=3e-5, every=100)
    budget = Budget(max_overhead=0.01, every_n_steps=100)
    run.train_for(budget, 2000)
    assert len(run.norms) == pytest.approx(2000 / 4, rel=0.1)
    run.light_s = 3e-5
    run.train_for(budget, 1000)
    assert run.norms[-500:] == list(range(run.steps - 500, run.steps))


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, float("nan")])
def test_an_implausible_share_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"HookLogger\(max_overhead=.*must be above 0"):
        Budget(max_overhead=wrong, every_n_steps=1)


@pytest.mark.parametrize("wrong", ["1%", True, None])
def test_a_share_that_is_not_a_number_is_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(max_overhead=.*must be a number"):
        Budget(max_overhead=wrong, every_n_steps=1)  # type: ignore[arg-type]


def test_the_stopwatch_adds_up_this_threads_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 1.5, 7.0, 7.25, 8.0, 8.5, 9.0])
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    watch = Budget(max_overhead=1, every_n_steps=1)
    with watch, watch:
        pass
    with watch:
        pass
    assert watch._take() == 0.75
    assert watch._take() == 0.0
    with watch:
        assert watch._take() == 0.5
    assert watch._take() == 0.5


def test_the_stopwatch_ignores_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0])
    monkeypatch.setattr("time.thread_time", lambda: next(times))
    watch = Budget(max_overhead=1, every_n_steps=1)

    def run_elsewhere() -> None:
        with watch:
            pass

    with watch:
        thread = threading.Thread(target=run_elsewhere)
        thread.start()
        thread.join()
    assert watch._take() == 2.0

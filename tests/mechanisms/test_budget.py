"""Account of telemetry's own time, on a clock that the tests advance."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from telemetry import HookLogger
from telemetry.capture import Budget


class Clock:
    """Replacement of :mod:`time` in the budget."""

    own_s = trained_s = 0.0

    def thread_time(self) -> float:
        return self.own_s

    def perf_counter(self) -> float:
        return self.own_s + self.trained_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("telemetry.capture.budget.time", clock)
    return clock


class Run:
    """Simulated run, with the cost in seconds of bare, full and light steps and of others."""

    def __init__(self, clock: Clock, share: float, every: int, costs_s: tuple[float, ...]) -> None:
        self.clock, self.every, self.costs_s = clock, every, costs_s
        self.steps = 0
        self.full: list[int] = []
        self.norms: list[int] = []
        self.curves: dict[int, Mapping[str, float]] = {}
        self.budget = Budget(
            max_overhead=share,
            every_n_steps=every,
            log_costs=lambda curves, step: self.curves.update({step: curves}),
        )
        self.budget.restart()

    def train_for(self, count: int) -> None:
        bare_s, full_s, light_s, skipped_s = self.costs_s
        for step in range(self.steps, self.steps + count):
            full, norms = self.budget.affords(step, full=step % self.every == 0)
            self.clock.trained_s += bare_s
            with self.budget:
                self.clock.own_s += full_s if full else light_s if norms else skipped_s
            self.full += [step] * full
            self.norms += [step] * norms
            self.budget.step_ended(step, full=full, norms=norms, device=torch.device("cpu"))
        self.steps += count

    @property
    def overhead(self) -> float:
        return self.clock.own_s / self.clock.trained_s

    @property
    def gaps(self) -> list[int]:
        return [after - before for before, after in pairwise(self.full)]


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
@pytest.mark.parametrize("light_s", [0.0, 1e-4, 1e-3])
def test_a_cnn_of_11_ms_stays_within_its_share_and_uses_it(
    clock: Clock, share: float, light_s: float
) -> None:
    run = Run(clock, share, 10, (0.011, 0.006, light_s, 1e-5))
    run.train_for(4000)
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


def test_the_interval_is_stretched_no_further_than_needed(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cheap = Run(clock, 0.01, 10, (0.1, 0.004, 0.0, 0.0))
    cheap.train_for(1000)
    assert cheap.full == [*range(0, 1000, 10)]
    assert not caplog.records
    run = Run(clock, 0.01, 3, (0.1, 0.02, 0.0, 0.0))
    run.train_for(3000)
    assert run.gaps[0] == 42  # 20 steps earn a full one, and the first is paid, too
    assert {*run.gaps[1:]} <= {18, 21}
    assert [run.curves[step]["telemetry/every_n_steps"] for step in run.full] == [3, *run.gaps]
    assert run.curves[run.full[-1]]["telemetry/overhead"] == pytest.approx(0.01, rel=0.02)


def test_time_of_the_worker_counts_and_time_before_a_restart_does_not(clock: Clock) -> None:
    run = Run(clock, 0.01, 10, (0.1, 0.01, 0.0, 0.0))
    run.train_for(1)
    run.budget.worker_took("full", 0.03)
    clock.trained_s += 1e6
    run.budget.restart()
    run.train_for(1000)
    assert run.gaps[0] == 90  # 80 steps earn two full ones, each with 0.03 s of the worker


def test_norms_are_measured_at_each_step_again_once_they_are_cheap(clock: Clock) -> None:
    run = Run(clock, 0.01, 100, (0.01, 0.01, 3e-4, 3e-5))
    run.train_for(2000)
    assert len(run.norms) == pytest.approx(2000 / 4, rel=0.1)
    run.costs_s = 0.01, 0.01, 3e-5, 3e-5
    run.train_for(1000)
    assert run.norms[-500:] == [*range(2500, 3000)]


def test_the_time_of_another_thread_does_not_count(clock: Clock) -> None:
    run = Run(clock, 0.01, 10, (0.1, 0.01, 0.0, 0.0))

    def run_elsewhere() -> None:
        with run.budget:
            clock.own_s += 5.0

    run.train_for(1)
    thread = threading.Thread(target=run_elsewhere)
    thread.start()
    thread.join()
    clock.own_s -= 5.0
    run.train_for(1000)
    assert run.gaps[0] == 30  # 20 steps earn two full ones


class Event:
    """CUDA event that the device reaches when a test sets ``at_ms``."""

    recorded: list[Event]

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_ms: float | None = None

    def record(self, stream: object) -> None:
        Event.recorded.append(self)

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Event) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        return end.at_ms - self.at_ms


def test_on_a_gpu_step_times_are_entered_when_the_device_reaches_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Event.recorded = []
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    logged: dict[int, float] = {}
    budget = Budget(
        max_overhead=0.1,
        every_n_steps=1,
        log_costs=lambda curves, step: logged.update({step: curves["telemetry/overhead"]}),
    )

    def end(step: int) -> None:
        budget.step_ended(step, full=step == 3, norms=True, device=torch.device("cuda"))

    for step in range(6):
        end(step)
    assert not logged
    assert budget.affords(6, full=True) == (False, True)
    for event, at_ms in zip(Event.recorded, [100, 200, 300, 430, 530, 630], strict=True):
        event.at_ms = at_ms
    end(6)
    # 30 ms more than the others, of 3 bare steps until then.
    assert logged == {3: pytest.approx(30 / 300)}
    assert budget.affords(7, full=True) == (False, True)  # 50 ms are earned, 60 would be spent


def test_a_failure_of_the_budget_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with HookLogger(model, tmp_path, max_overhead=0.5, every_n_steps=1000):
        for step in range(4):
            if step == 2:  # light steps
                monkeypatch.setattr(Budget, "affords", fail)
            model(torch.randn(4, 3)).square().mean().backward()
            optimizer.step()
    assert "to begin a step" in caplog.text

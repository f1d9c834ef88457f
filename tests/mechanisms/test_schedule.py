"""Account of the schedule, on a clock that the tests advance; and fast loops."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from telemetry import Alert, Detector, Finding, HookLogger, StepRecord, read
from telemetry.capture import Schedule, schedule
from tests.helpers.small_runs import fit
from tests.helpers.tiny_run import TinyRun
from tests.helpers.twins import Recorder


class Clock:
    """Replacement of :mod:`time` in the schedule."""

    own_s = trained_s = 0.0

    def thread_time(self) -> float:
        return self.own_s

    def perf_counter(self) -> float:
        return self.own_s + self.trained_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(schedule, "time", clock)
    return clock


class Run:
    """Simulated run, with the cost in seconds of bare, full, light and skipped steps.

    The worker takes as much again for a step with norms.
    """

    def __init__(
        self, clock: Clock, share: float | None, every: int, costs_s: tuple[float, ...]
    ) -> None:
        self.clock, self.every, self.costs_s = clock, every, costs_s
        self.steps, self.worker_s = 0, 0.0
        self.full: list[int] = []
        self.norms: list[int] = []
        self.curves: dict[int, Mapping[str, float]] = {}
        self.schedule = Schedule(
            every, share, lambda curves, step: self.curves.update({step: curves})
        )
        self.schedule.account.restart()

    def train_for(self, count: int) -> None:
        bare_s, full_s, light_s, skipped_s = self.costs_s
        for step in range(self.steps, self.steps + count):
            plan = self.schedule.plan(step)
            self.clock.trained_s += bare_s
            with self.schedule.account.stopwatch:
                self.clock.own_s += {"full": full_s, "norms": light_s, "skip": skipped_s}[plan]
            if plan != "skip":
                on_worker_s = light_s if plan == "norms" else 0.0
                self.worker_s += on_worker_s
                self.schedule.account.worker_took(plan, on_worker_s)
            self.full += [step] * (plan == "full")
            self.norms += [step] * (plan != "skip")
        self.steps += count

    @property
    def overhead(self) -> float:
        return (self.clock.own_s + self.worker_s) / self.clock.trained_s

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
    assert run.overhead <= share * 1.02
    affordable = 400 * 0.006 / (4000 * 0.011) + 2 * light_s / 0.011
    assert run.overhead > 0.9 * min(share, affordable)
    # A quarter of the share remains for full steps, and for what skipped ones cost.
    later = [step for step in run.full if step >= 2000]
    assert len(later) >= min(200, 0.15 * share * 2000 * 0.011 / 0.006)
    if 2 * light_s <= 0.75 * share * 0.011:
        assert len(run.norms) == 4000
    else:
        assert len(run.norms) > 0.3 * share * 4000 * 0.011 / (2 * light_s)


def test_the_interval_is_stretched_no_further_than_needed(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    cheap = Run(clock, 0.01, 10, (0.1, 0.003, 0.0, 0.0))
    cheap.train_for(1000)
    assert cheap.full == [*range(0, 1000, 10)]
    assert not caplog.records
    run = Run(clock, 0.01, 3, (0.1, 0.02, 0.0, 0.0))
    run.train_for(3000)
    assert run.gaps[0] == 42  # 20 steps earn a full one, and the first is paid, too
    assert {*run.gaps[1:]} <= {19, 20, 21}
    shown = [run.curves[step]["telemetry/every_n_steps"] for step in run.full[:-1]]
    assert shown == [3, *run.gaps[:-1]]
    assert run.curves[run.full[-2]]["telemetry/overhead"] == pytest.approx(0.01, rel=0.02)


def test_time_of_the_worker_counts_and_time_before_a_restart_does_not(clock: Clock) -> None:
    run = Run(clock, 0.01, 10, (0.1, 0.01, 0.0, 0.0))
    run.train_for(1)
    run.schedule.account.worker_took("full", 0.03)
    clock.trained_s += 1e6
    run.schedule.account.restart()
    run.train_for(1000)
    assert run.gaps[0] == pytest.approx(47, abs=2)  # that earn 30 ms, and 10 + 15 on average


def test_the_time_of_another_thread_does_not_count(clock: Clock) -> None:
    run = Run(clock, 0.01, 10, (0.1, 0.01, 0.0, 0.0))

    def run_elsewhere() -> None:
        with run.schedule.account.stopwatch:
            clock.own_s += 5.0

    run.train_for(1)
    thread = threading.Thread(target=run_elsewhere)
    thread.start()
    thread.join()
    clock.own_s -= 5.0
    run.train_for(1000)
    assert run.gaps[0] == pytest.approx(20, abs=2)  # steps that earn two full ones


@pytest.mark.parametrize(("light_us", "every"), [(14, 1), (30, 2), (115, 8), (10_000, 64)])
def test_by_default_norms_take_three_percent_after_the_first_256_steps(
    clock: Clock, light_us: float, every: int
) -> None:
    run = Run(clock, None, 100, (1e-3, 0.01, light_us * 1e-6, 0.0))
    run.train_for(1256)
    assert run.norms[:256] == [*range(256)]
    assert run.full == [*range(0, 1256, 100)]  # are not charged
    later = [step for step in run.norms if step >= 656 and step % 100]
    assert len(later) >= 6
    assert 600 / len(later) == pytest.approx(every, rel=0.15) or every == 64
    shown = [curves["telemetry/norms_every_n_steps"] for curves in run.curves.values()]
    assert bool(shown) == (every > 1)
    assert not shown or shown[-1] == pytest.approx(every, rel=0.25)
    run.costs_s = (1e-3, 0.01, 1e-6, 0.0)  # cheap again
    run.train_for(3000)
    assert run.norms[-500:] == [*range(run.steps - 500, run.steps)]


@pytest.mark.parametrize("loss", [2.1, math.inf, math.nan])
def test_norms_are_added_to_a_skipped_step_by_an_unusual_loss_and_to_the_next_64(
    clock: Clock, loss: float
) -> None:
    run = Run(clock, None, 1000, (1e-3, 0.01, 1.0, 0.0))
    run.train_for(500)
    plans = run.schedule
    plans.loss_tag = "loss"
    plans.judged(499, full=False, confirmed=False, needed=0, norms_above=2.0)
    assert plans.plan(500) == "skip"
    assert not plans.logged(500, {"loss": 2.0, "other": 9.0})
    assert plans.plan(500) == "skip"
    assert plans.logged(500, {"loss": loss})
    assert [plans.plan(step) for step in range(500, 565)] == ["norms"] * 65
    assert [plans.plan(step) for step in range(565, 600)] == ["skip"] * 35


def test_a_broken_run_is_granted_one_request_and_a_fault_after_it_another() -> None:
    plans, granted = Schedule(100, math.inf), []

    def train(steps: range, *, is_finite: bool) -> None:
        for step in steps:
            full = plans.plan(step) == "full"
            count = plans.judged(
                step,
                full=full,
                confirmed=step == 500,  # by the first NaN
                needed=2 * (step >= 500),
                norms_above=math.inf,
                is_finite=is_finite,
            )
            if count:
                granted.append(step)
                plans.request_full(step + 2, count)

    train(range(500), is_finite=True)
    train(range(500, 2000), is_finite=False)
    assert plans.requested <= 5
    assert max(granted) < 520
    train(range(2000, 2100), is_finite=True)
    assert max(granted) >= 2000


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
    plans = Schedule(
        1000, 0.1, lambda curves, step: logged.update({step: curves["telemetry/overhead"]})
    )
    plans.account.measure(torch.device("cuda"))
    plans.request_full(4)
    assert [plans.plan(step) for step in range(1, 7)] == [*["norms"] * 3, "full", *["norms"] * 2]
    plans.request_full(7)
    assert plans.plan(7) == "norms"  # the cost of the full step is unknown
    assert not logged
    for event, at_ms in zip(Event.recorded, [100, 200, 300, 430, 530, 630], strict=True):
        event.at_ms = at_ms
    # 20 ms are earned in the steps before it, 50 in all; 60 would be spent.
    assert plans.plan(8) == "norms"
    assert logged == {4: pytest.approx(30 / 500)}
    for event in Event.recorded[6:]:
        event.at_ms = 730
    assert plans.plan(9) == "full"


def test_a_failure_of_the_schedule_stops_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("planted")

    run = TinyRun(tmp_path)
    with run.logger:
        run.train(2)
        monkeypatch.setattr(Schedule, "plan", fail)  # of light steps
        run.train(2)
    assert "to plan a step" in caplog.text
    assert {*read(tmp_path).layers["step"]} == {0, 1, 2, 3}


# --- fast loops ----------------------------------------------------------------------------------


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the share, so that each step costs too much."""
    monkeypatch.setattr(schedule, "SHARE", 1e-6)


def train(
    log_dir: Path, *, spike: int | None = None, **options: Any
) -> tuple[tuple[Alert, ...], list[int]]:
    """Return the alerts and the steps whose gradient norms are in the event file."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 4)
        return F.mse_loss(model(x), x.sum(1, keepdim=True) * (300 if step == spike else 1))

    with HookLogger(model, log_dir, measure="!images", **options) as logger:
        fit(logger, 600, loss_of, optimizer)
    return logger.alerts, sorted({*read(log_dir).layers["step"].tolist()})


@pytest.mark.slow
def test_a_healthy_run_has_norms_of_some_steps_and_each_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fast: None
) -> None:
    with caplog.at_level(logging.INFO, "telemetry"):
        alerts, steps = train(tmp_path)
    assert alerts == ()
    assert steps[:256] == [*range(256)]
    later = [number for number in steps if number >= 256]
    assert len(later) < 344 / 2  # with those after unusual ones
    assert {300, 400, 500} <= {*later}  # full steps
    table = read(tmp_path).scalars
    assert table[table.tag == "loss"].step.tolist() == [*range(600)]
    assert max(table[table.tag == "telemetry/norms_every_n_steps"].value) > 1
    [line] = [message for message in caplog.messages if "norms_every_n_steps" in message]
    assert "max_overhead=math.inf" in line


@pytest.mark.slow
def test_a_loss_spike_is_found_at_its_step_and_the_next_64_are_measured(
    tmp_path: Path, fast: None
) -> None:
    rules = {"weight_jump": None}  # depending on when the next full step comes, it speaks first
    alerts, steps = train(tmp_path, spike=507, alerts=rules)
    assert {*range(507, 571)} <= {*steps}
    started = {(alert.kind, alert.step) for alert in alerts if alert.stage == "started"}
    assert ("loss_spike", 507) in started


class EachStep(Detector):
    """Custom detector that stores the number of each step."""

    kind = "each_step"

    def set_up(self) -> None:
        self.steps: list[int] = []

    def find(self, record: StepRecord, baseline: Any) -> Finding | None:
        self.steps.append(record.step)
        return None


@pytest.mark.slow
def test_custom_rules_and_detectors_receive_every_step(tmp_path: Path, fast: None) -> None:
    recorder, detector = Recorder(), EachStep()
    train(tmp_path / "rule", alerts=[recorder])
    train(tmp_path / "detector", alerts={"each_step": detector})
    assert [record.step for record in recorder.records] == detector.steps == [*range(600)]


@pytest.mark.slow
def test_without_rules_no_step_is_unusual_and_an_infinite_share_measures_each(
    tmp_path: Path, fast: None
) -> None:
    _, steps = train(tmp_path / "limited", alerts=())
    assert len(steps) < 256 + 60
    _, steps = train(tmp_path / "unlimited", alerts=(), max_overhead=math.inf)
    assert steps == [*range(600)]

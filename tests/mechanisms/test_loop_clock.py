"""Clock of the loop: where the time of a step goes, by a clock that the loops advance."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import HookLogger, StepRecord
from telemetry.capture.clock import CpuWaits, LoopClock
from telemetry.capture.step import Step
from telemetry.pipeline import Pipeline
from tests.helpers import shell
from tests.helpers.figures import figures
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import Recorder

TIMES = [f"time/{part}_s" for part in ("data_wait", "forward", "backward", "optimizer")]
WAIT_S, FORWARD_S, LOSS_S, BACKWARD_S, OPTIMIZER_S = 0.5, 0.25, 0.03, 1.0, 0.125
STEP_S = WAIT_S + FORWARD_S + LOSS_S + BACKWARD_S + OPTIMIZER_S
EXPECTED = pytest.approx((WAIT_S, FORWARD_S + LOSS_S, BACKWARD_S, OPTIMIZER_S))


class Time:
    """Clock that stands still unless a loop advances it; also of a thread without a CPU."""

    now, no_cpu = 100.0, 5.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float, *, no_cpu: float = 0.0) -> None:
        self.now += seconds
        self.no_cpu += no_cpu


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("telemetry.capture.clock.perf_counter", clock)
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: clock.no_cpu)
    return clock


class Model(nn.Module):
    """Layers of vectors or indices, whose passes take a quarter of a second and a second."""

    def __init__(self, clock: Time) -> None:
        super().__init__()
        self.clock = clock
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.passes(FORWARD_S)
        x = x if x.is_floating_point() else F.one_hot(x, 4).float()
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda grad: self.clock.passes(BACKWARD_S))
        out: Tensor = self.last(hidden)
        return out


def optimizer_of(model: nn.Module, clock: Time) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *args: clock.passes(OPTIMIZER_S))
    return optimizer


def batches(clock: Time, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        clock.passes(WAIT_S)
        yield torch.rand(8, 4)


def train(
    model: nn.Module,
    clock: Time,
    steps: int = 12,
    passes: int = 1,
    at: Callable[[str], None] = lambda place: None,
) -> None:
    optimizer = optimizer_of(model, clock)
    loader = batches(clock, steps * passes)
    for _ in range(steps):
        for _, batch in zip(range(passes), loader, strict=False):
            loss = model(batch).square().mean()
            clock.passes(LOSS_S)
            at("forward")
            loss.backward()
            at("backward")
        optimizer.step()
        optimizer.zero_grad()
        at("step")


def records_of(
    log_dir: Any, model: nn.Module, body: Callable[[HookLogger], None]
) -> list[StepRecord]:
    recorder = Recorder()
    with HookLogger(model, log_dir, alerts=[recorder], every_n_steps=5) as logger:
        body(logger)
    return recorder.records


def times_of(
    log_dir: Any, model: nn.Module, body: Callable[[HookLogger], None]
) -> list[tuple[float, ...]]:
    """Return the times of the steps that are not full."""
    records = [record for record in records_of(log_dir, model, body) if not record.full]
    return [tuple([record.usage[tag] for tag in TIMES]) for record in records]


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_each_part_of_a_step_has_its_time_and_micro_batches_add_up(
    tmp_path: Path, clock: Time, passes: int
) -> None:
    model = Model(clock)
    times = times_of(tmp_path, model, lambda logger: train(model, clock, passes=passes))
    in_passes = [passes * seconds for seconds in (WAIT_S, FORWARD_S + LOSS_S, BACKWARD_S)]
    assert times == [pytest.approx((*in_passes, OPTIMIZER_S))] * 9
    [line] = [line for line in shell.lines("summary", tmp_path) if "a step takes" in line]
    step_s = sum(in_passes) + OPTIMIZER_S
    assert figures(line)[:2] == pytest.approx([step_s, 100 * in_passes[0] / step_s], rel=0.02)
    assert "MiB" in line


def test_waiting_for_the_logger_is_not_waiting_for_data(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slowed(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def slow(*args: Any) -> Any:
            clock.passes(10.0)
            return method(*args)

        monkeypatch.setattr(owner, name, slow)

    slowed(Pipeline, "flush")
    slowed(Step, "_read_at_once")
    slowed(Step, "end")
    model = Model(clock)

    def body(logger: HookLogger) -> None:
        def wait(place: str) -> None:
            before = clock.now
            logger.flush()
            logger.state_dict()
            assert clock.now >= before + 20

        train(model, clock, at=wait)

    assert times_of(tmp_path, model, body) == [EXPECTED] * 9


@pytest.mark.parametrize("kind", ["another model", "a copy", "another thread", "a phase"])
def test_what_is_no_training_of_the_model_is_not_waited_for(
    tmp_path: Path, clock: Time, kind: str
) -> None:
    model, other = Model(clock), Model(clock)
    twin = copy.copy(model)
    optimizer = optimizer_of(other, clock)

    def body(logger: HookLogger) -> None:
        def between(place: str) -> None:
            if place != "step":
                return
            if kind == "another model":
                other(torch.rand(8, 4)).sum().backward()
                optimizer.step()
            elif kind == "a copy":
                twin(torch.rand(8, 4)).sum().backward()
                model.zero_grad()
            elif kind == "a phase":
                with logger.phase("validation"), torch.no_grad():
                    model(torch.rand(8, 4))
            else:
                thread = threading.Thread(target=model, args=(torch.rand(8, 4),))
                thread.start()
                thread.join()
                clock.passes(-FORWARD_S)

        train(model, clock, at=between)

    assert times_of(tmp_path, model, body) == [EXPECTED] * 9


def test_two_models_of_a_gan_add_up(tmp_path: Path, clock: Time) -> None:
    parts = nn.ModuleDict({"g": Model(clock), "d": Model(clock)})

    def loop(logger: HookLogger) -> None:
        steps = [optimizer_of(parts[name], clock) for name in ("d", "g")]
        for batch in batches(clock, 12):
            with torch.no_grad():
                fake = parts["g"](torch.rand(8, 4))
            (parts["d"](batch).mean() - parts["d"](fake).mean()).backward()
            steps[0].step()
            (-parts["d"](parts["g"](torch.rand(8, 4))).mean()).backward()
            steps[1].step()
            parts.zero_grad()

    times = times_of(tmp_path, parts, loop)
    # Waiting begins again at a call without gradients.
    expected = FORWARD_S, 4 * FORWARD_S, 4 * BACKWARD_S, 2 * OPTIMIZER_S
    assert times[-3:] == [pytest.approx(expected)] * 3


def test_tokens_are_counted_where_the_model_takes_indices(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)
    optimizer = optimizer_of(model, clock)

    def loop(logger: HookLogger) -> None:
        for step in range(11):
            clock.passes(WAIT_S)
            given = torch.randint(4, (2, 10 + step))
            (model(given) if step % 2 else model(x=given)).sum().backward()
            optimizer.step()

    records = records_of(tmp_path, model, loop)
    assert [r.tokens for r in records[1:]] == [2 * (10 + step) for step in range(1, 11)]
    table = telemetry.read(tmp_path).scalars
    rates = table[table.tag == "time/tokens_per_s"]
    step_s = STEP_S - LOSS_S
    # Means of steps 1 to 4, and 6 to 9: full steps count only where there are no others.
    assert rates.step.tolist() == [5, 10]
    assert rates.value.tolist() == pytest.approx([25 / step_s, 35 / step_s], rel=1e-6)


@needs_observable_graphs
def test_a_compiled_model_is_seen_from_outside(tmp_path: Path, clock: Time) -> None:
    torch._dynamo.reset()
    inside = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = torch.compile(inside, backend="eager")

    def body(logger: HookLogger) -> None:
        train(model, clock)
        assert not inside._forward_pre_hooks

    times = times_of(tmp_path, model, body)
    assert not model._forward_pre_hooks
    assert times == [pytest.approx((WAIT_S, LOSS_S, 0.0, OPTIMIZER_S))] * 9
    torch._dynamo.reset()


def test_waiting_for_a_cpu_is_not_waiting_for_data(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)

    def busy(place: str) -> None:
        if place == "step":  # the next step waits
            clock.passes(0.1, no_cpu=0.1)
        elif place == "forward":  # this is no wait
            clock.no_cpu += 0.2

    assert times_of(tmp_path, model, lambda logger: train(model, clock, at=busy)) == [EXPECTED] * 9


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts it")
def test_linux_counts_the_time_without_a_cpu_for_each_thread() -> None:
    def waited_s() -> float:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) * 1e-9

    waits, before = CpuWaits(), waited_s()
    assert 0 < before <= waits.seconds() <= waited_s()
    waits.close()


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_is_measured_by_events(
    tmp_path: Path,
    clock: Time,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: bool,
) -> None:
    class Event:
        """CUDA event that takes the time of the device when it is recorded."""

        def __init__(self, **options: bool) -> None:
            assert options == {"enable_timing": True, "blocking": True}

        def record(self, stream: object) -> None:
            if lost:
                raise RuntimeError("the device is lost")
            self.at_s = clock.now

        def elapsed_time(self, end: Event) -> float:
            return (end.at_s - self.at_s) * 1e3

        def synchronize(self) -> None:
            assert threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    counts = {"allocated_bytes": {"all": {"current": 1000, "peak": 3000}}}
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device: counts)
    measure, gpu = LoopClock.measure, torch.device("cuda", 0)
    monkeypatch.setattr(LoopClock, "measure", lambda self, device: measure(self, gpu))
    model = Model(clock)
    records = records_of(tmp_path, model, lambda logger: train(model, clock, steps=21))
    light = [record.usage for record in records if not record.full]
    if lost:
        assert len(records) == 21
        assert TIMES[0] not in light[-1]
        assert "to measure the time of a step" in caplog.text
        return
    assert [tuple([usage[tag] for tag in TIMES]) for usage in light] == [EXPECTED] * 16
    table = telemetry.read(tmp_path).scalars
    for tag, value in (("memory/allocated_bytes", 1000), ("memory/peak_bytes", 3000)):
        assert table[table.tag == tag].value.tolist() == [value] * 3

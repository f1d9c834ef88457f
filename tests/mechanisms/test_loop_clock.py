"""Clock of the loop: where the time of a step goes, by a clock that the loops advance."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.tensorboard import SummaryWriter

import telemetry
from telemetry import HookLogger
from telemetry.capture.clock import LoopClock
from telemetry.capture.light_step import LightReader
from telemetry.capture.usage import APART, CpuWaits, Laps
from telemetry.failures import Failures
from telemetry.pipeline import Pipeline
from telemetry.tag_names import ALLOCATED_BYTES, PEAK_BYTES, TIMES
from tests.helpers import shell
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import Recorder

WAIT_S, FORWARD_S, LOSS_S, BACKWARD_S, CLIP_S, OPTIMIZER_S = 0.5, 0.25, 0.03, 1.0, 0.02, 0.125
STEP_S = WAIT_S + FORWARD_S + LOSS_S + BACKWARD_S + CLIP_S + OPTIMIZER_S
EXPECTED = pytest.approx((WAIT_S, FORWARD_S + LOSS_S, BACKWARD_S, CLIP_S + OPTIMIZER_S))


class Time:
    """Clock that stands still unless a loop advances it."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr("telemetry.capture.clock.perf_counter", clock)
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: 0.0)
    return clock


class Slow(torch.autograd.Function):
    """Identity whose backward pass takes a second."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Time) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.clock.passes(BACKWARD_S)
        return grads[0], None


class Model(nn.Module):
    """Layers whose forward pass takes a quarter of a second."""

    def __init__(self, clock: Time) -> None:
        super().__init__()
        self.clock = clock
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.passes(FORWARD_S)
        if x.dtype == torch.int64:
            x = F.one_hot(x, 4).float()
        out: Tensor = self.last(Slow.apply(self.first(x), self.clock))
        return out

    def __deepcopy__(self, memo: Any) -> Any:
        twin = Model(self.clock)
        twin.load_state_dict(self.state_dict())
        return twin


def optimizer_of(model: nn.Module, clock: Time) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_post_hook(lambda *args: clock.passes(OPTIMIZER_S))
    return optimizer


def batches(clock: Time, count: int) -> Iterator[Tensor]:
    for _ in range(count):
        clock.passes(WAIT_S)
        yield torch.rand(8, 4)


def loss_of(model: nn.Module, batch: Tensor, clock: Time) -> Tensor:
    loss = F.mse_loss(model(batch), batch)
    clock.passes(LOSS_S)
    return loss


def train(
    model: nn.Module,
    clock: Time,
    steps: int = 12,
    passes: int = 1,
    between: Callable[[str], None] = lambda place: None,
) -> None:
    optimizer = optimizer_of(model, clock)
    loader = batches(clock, steps * passes)
    for _ in range(steps):
        for _ in range(passes):
            loss = loss_of(model, next(loader), clock)
            between("forward")
            loss.backward()
            between("backward")
        clock.passes(CLIP_S)
        optimizer.step()
        optimizer.zero_grad()
        between("step")


def times_of(
    log_dir: Path, model: nn.Module, body: Callable[[HookLogger], None]
) -> list[tuple[float, ...]]:
    """Return the times of the steps that are not full."""
    recorder = Recorder()
    with HookLogger(model, log_dir, alerts=[recorder], every_n_steps=5) as logger:
        body(logger)
    records = [record for record in recorder.records if not record.full]
    return [tuple([record.usage[tag] for tag in TIMES]) for record in records]


@pytest.mark.parametrize("passes", [1, 2, 5])
def test_each_part_of_a_step_has_its_time_and_micro_batches_add_up(
    tmp_path: Path, clock: Time, passes: int
) -> None:
    model = Model(clock)
    times = times_of(tmp_path, model, lambda logger: train(model, clock, passes=passes))
    forward, backward = passes * (FORWARD_S + LOSS_S), passes * BACKWARD_S
    expected = passes * WAIT_S, forward, backward, CLIP_S + OPTIMIZER_S
    assert times == [pytest.approx(expected)] * 9


def test_waiting_for_the_logger_is_not_waiting_for_data(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = Pipeline.flush
    model, flushed = Model(clock), list[str]()

    def late(pipeline: Pipeline, timeout_s: float = 1.0) -> None:
        clock.passes(10.0)
        flush(pipeline, timeout_s)

    for name in ("read", "completed"):
        method = getattr(LightReader, name)

        def slow(self: Any, *args: Any, method: Any = method) -> Any:
            clock.passes(7.0)
            return method(self, *args)

        monkeypatch.setattr(LightReader, name, slow)
    monkeypatch.setattr(Pipeline, "flush", late)
    with SummaryWriter(tmp_path) as writer:

        def body(logger: HookLogger) -> None:
            def wait(place: str) -> None:
                flushed.append(place)
                before = clock.now
                logger.flush()
                logger.state_dict()
                assert logger.alerts == ()
                writer.flush()
                assert clock.now >= before + 20

            train(model, clock, between=wait)

        times = times_of(writer, model, body)  # type: ignore[arg-type]
    assert times == [EXPECTED] * 9
    assert len(flushed) == 3 * 12


@pytest.mark.parametrize("kind", ["another model", "a copy", "another thread", "a phase"])
def test_what_is_no_training_of_the_model_is_not_waited_for(
    tmp_path: Path, clock: Time, kind: str
) -> None:
    model = Model(clock)
    twin = copy.deepcopy(model)
    optimizer = optimizer_of(twin, clock)

    def body(logger: HookLogger) -> None:
        def between(place: str) -> None:
            if place != "step":
                return
            if kind == "another model":
                loss_of(twin, torch.rand(8, 4), clock).backward()
                optimizer.step()
            elif kind == "a copy":
                twin(torch.rand(8, 4)).sum().backward()
            elif kind == "a phase":
                with logger.phase("validation"), torch.no_grad():
                    for batch in batches(clock, 50):
                        model(batch)
            else:
                thread = threading.Thread(target=model, args=(torch.rand(8, 4),))
                thread.start()
                thread.join()
                clock.passes(-FORWARD_S)

        train(model, clock, between=between)

    assert times_of(tmp_path, model, body) == [EXPECTED] * 9


def test_the_last_call_of_a_validation_ends_when_training_waits_again(
    tmp_path: Path, clock: Time
) -> None:
    model = Model(clock)

    def validate(place: str) -> None:
        if place == "step":
            model.eval()
            for batch in batches(clock, 50):
                model(batch)
            model.train()

    times = times_of(tmp_path, model, lambda log: train(model, clock, between=validate))
    assert [wait for wait, *_ in times] == pytest.approx([WAIT_S + FORWARD_S] * 9)


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


def test_one_in_five_of_short_steps_is_measured(tmp_path: Path, clock: Time) -> None:
    model, recorder = nn.Linear(4, 4), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=100):
        for _ in range(80):
            clock.passes(1e-3)
            model(torch.rand(8, 4)).sum().backward()
            clock.passes(2e-3)
            optimizer.step()
    found = [record.usage for record in recorder.records if TIMES[0] in record.usage]
    assert [usage[TIMES[0]] for usage in found] == pytest.approx([1e-3] * 16)


def test_tokens_are_counted_where_the_model_takes_indices(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)
    optimizer, recorder = optimizer_of(model, clock), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=5):
        for step in range(11):
            clock.passes(WAIT_S)
            given = torch.randint(4, (2, 10 + step))
            (model(given) if step % 2 else model(x=given)).sum().backward()
            optimizer.step()
    assert [r.tokens for r in recorder.records[1:]] == [2 * (10 + step) for step in range(1, 11)]
    table = telemetry.read(tmp_path).scalars
    rates = table[table.tag == "time/tokens_per_s"]
    step_s = STEP_S - LOSS_S - CLIP_S
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
    assert times == [pytest.approx((WAIT_S, LOSS_S, 0.0, CLIP_S + OPTIMIZER_S))] * 9
    torch._dynamo.reset()


def test_no_hook_is_left_and_light_steps_run_without_global_hooks(
    tmp_path: Path, clock: Time
) -> None:
    hooks = nn.modules.module._global_forward_pre_hooks
    before, backward = dict(hooks), torch.autograd.backward
    model = Model(clock)
    inside: list[int] = []
    model.first.register_forward_hook(lambda *args: inside.append(len(hooks) - len(before)))

    def fail(*args: Any) -> None:
        raise RuntimeError("out of memory")

    with HookLogger(model, tmp_path):
        train(model, clock, steps=4, passes=2)
        assert not {**model._forward_hooks, **model._forward_pre_hooks}
        handle = model.last.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.rand(8, 4))
        handle.remove()
        train(model, clock, steps=2)
    assert dict(hooks) == before
    assert torch.autograd.backward is backward
    assert not {**model._forward_hooks, **model._forward_pre_hooks}
    assert inside[2:8] == [0] * 6


def test_a_summary_tells_the_parts_of_a_step(
    tmp_path: Path, clock: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(clock)
    times_of(tmp_path, model, lambda logger: train(model, clock))
    assert shell.run("summary", tmp_path) == 0
    printed = capsys.readouterr().out
    assert f"a step takes {STEP_S:.2g}" in printed
    assert f" {WAIT_S / STEP_S:.0%}, " in printed
    assert "MiB" in printed


# --- GPUs -----------------------------------------------------------------------------------------


class Event:
    """A CUDA event that takes the time of the device when it is recorded."""

    synchronized = 0

    def __init__(self, **options: bool) -> None:
        assert options == {"enable_timing": True, "blocking": True}

    def record(self, stream: object) -> None:
        self.at_s = device_time.now

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3

    def synchronize(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        Event.synchronized += 1


device_time = Time()


def test_a_gpu_is_measured_by_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: 0.0)
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    counts = {"allocated_bytes": {"all": {"current": 1000, "peak": 3000}}}
    monkeypatch.setattr("torch.cuda.memory_stats_as_nested_dict", lambda device: counts)
    measure = LoopClock.measure
    monkeypatch.setattr(
        LoopClock, "measure", lambda self, device: measure(self, torch.device("cuda", 0))
    )
    model = Model(device_time)
    times = times_of(tmp_path, model, lambda logger: train(model, device_time, steps=21))
    assert Event.synchronized >= 20
    assert times == [EXPECTED] * 16
    table = telemetry.read(tmp_path).scalars
    assert table[table.tag == ALLOCATED_BYTES].value.tolist() == [1000.0] * 3
    assert {*table[table.tag == PEAK_BYTES].value} == {3000.0}


def test_a_failing_event_ends_no_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**options: bool) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("torch.cuda.Event", fail)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    clock = LoopClock(nn.Linear(4, 4), Failures())
    clock.measure(torch.device("cuda", 0))
    clock.start()
    clock.lap(1)
    assert clock.take() is None
    assert "to measure the time of a step" in caplog.text
    clock.stop()


def test_laps_without_steps_have_no_times() -> None:
    laps = Laps([1.0] * 6, [], 0, 0, (5, 6))
    assert laps.usage() == {ALLOCATED_BYTES: 5, PEAK_BYTES: 6}


# --- waiting for a CPU ----------------------------------------------------------------------------


def test_waiting_for_a_cpu_is_not_waiting_for_data(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    # At the begin of each step, after another model's pass, and at the begin of the forward pass.
    readings = iter([1.0, 1.001, 1.002, 2.0, 3.0, 3.004, 3.0, 3.1, 3.12, 4.0])
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: next(readings))
    model, waits = nn.Linear(4, 4), []
    loop = LoopClock(model, Failures())
    loop.start()
    for _ in range(3):
        loop.restart_wait()
        clock.passes(0.05)
        loop.before_call(model, (torch.ones(2, 4),))
        loop.end_step()
        if laps := loop.take():
            waits.append(laps.usage()[TIMES[0]])
        clock.passes(1.0)
        loop.begin_step()
    loop.stop()
    assert waits == pytest.approx([0.046, 0.030])


def test_waiting_for_a_cpu_apart_from_the_wait_does_not_shorten_it(
    clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Begin and end of the first step; begin of the second, its evaluation, and its forward pass.
    readings = iter([0.0, 0.0, 0.0, 0.001, 1.0, 1.002])
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: next(readings))
    model = nn.Linear(4, 4)
    loop = LoopClock(model, Failures())
    loop.start()
    loop.end_step()
    loop.take()
    loop.begin_step()
    loop.lap(APART)
    loop.wait()
    loop.before_call(model, (torch.ones(2, 4),))
    loop.end_step()
    laps = loop.take()
    loop.stop()
    assert laps is not None
    assert laps.no_cpu_s == pytest.approx(0.003)


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts it")
def test_a_thread_that_shares_a_cpu_waits_for_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    other = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    measured = list[float]()

    def share_the_cpu() -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        waits, end = CpuWaits(), time.monotonic() + 120
        before = waits.seconds()
        while waits.seconds() == before and time.monotonic() < end:
            pass
        measured.append(waits.seconds() - before)
        waits.close()

    process = subprocess.Popen([sys.executable, "-c", other], stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        thread = threading.Thread(target=share_the_cpu)
        thread.start()
        thread.join()
        process.kill()
    assert measured[0] > 0

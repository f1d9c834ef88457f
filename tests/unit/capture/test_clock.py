"""The clock of the loop: where the time of a step goes, by a clock that the loops advance."""

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
from telemetry.capture import clock as clock_module
from telemetry.capture.clock import LoopClock
from telemetry.capture.usage import APART, CpuWaits, Laps
from telemetry.commands.cli import main
from telemetry.failures import Failures
from telemetry.pipeline.queue import Pipeline
from telemetry.tag_names import ALLOCATED_BYTES, HOST_BYTES, HOST_OWN_BYTES, PEAK_BYTES, TIMES
from tests.helpers.require import needs_observable_graphs
from tests.helpers.twins import Recorder, assert_left_alone

WAIT_S, FORWARD_S, LOSS_S, BACKWARD_S, CLIP_S, OPTIMIZER_S = 0.5, 0.25, 0.03, 1.0, 0.02, 0.125


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
    monkeypatch.setattr(clock_module, "perf_counter", clock)
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
    model: nn.Module, clock: Time, steps: int = 12, passes: int = 1, between: Any = None
) -> None:
    optimizer = optimizer_of(model, clock)
    loader = batches(clock, steps * passes)
    for step in range(steps):
        for _ in range(passes):
            loss_of(model, next(loader), clock).backward()
        clock.passes(CLIP_S)
        optimizer.step()
        optimizer.zero_grad()
        if between is not None:
            between(step)


def usage_of(
    log_dir: Path, model: nn.Module, body: Callable[[HookLogger], None], every: int = 5
) -> list[tuple[float, ...]]:
    """Return the times of the steps that are not full."""
    recorder = Recorder()
    with HookLogger(model, log_dir, alerts=[recorder], every_n_steps=every) as logger:
        body(logger)
    records = [record for record in recorder.records if not record.full]
    return [tuple([record.usage[tag] for tag in TIMES]) for record in records]


EXPECTED = pytest.approx((WAIT_S, FORWARD_S + LOSS_S, BACKWARD_S, CLIP_S + OPTIMIZER_S))


@pytest.mark.parametrize("wait", ["flush", "state_dict", "alerts", "writer"])
@pytest.mark.parametrize("at", ["forward", "backward", "optimizer"])
def test_waiting_for_the_logger_is_not_waiting_for_data(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch, wait: str, at: str
) -> None:
    flush = Pipeline.flush

    def late(pipeline: Pipeline, timeout_s: float = 1.0) -> None:
        clock.passes(10.0)
        flush(pipeline, timeout_s)

    monkeypatch.setattr(Pipeline, "flush", late)
    model, recorder = Model(clock), Recorder()
    with (
        SummaryWriter(tmp_path) as writer,
        HookLogger(model, writer, alerts=[recorder], every_n_steps=5) as logger,
    ):
        waits = {
            "flush": logger.flush,
            "state_dict": logger.state_dict,
            "alerts": lambda: logger.alerts,
            "writer": writer.flush,
        }
        optimizer = optimizer_of(model, clock)
        for batch in batches(clock, 12):
            loss = loss_of(model, batch, clock)
            if at == "forward":
                waits[wait]()
            loss.backward()
            if at == "backward":
                waits[wait]()
            clock.passes(CLIP_S)
            optimizer.step()
            optimizer.zero_grad()
            if at == "optimizer":
                waits[wait]()
    times = [tuple([record.usage[tag] for tag in TIMES]) for record in recorder.records[1:]]
    assert len(times) == 11
    assert times == [EXPECTED] * 11


def test_each_part_of_a_step_has_its_time(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)
    times = usage_of(tmp_path, model, lambda logger: train(model, clock))
    assert len(times) == 9
    assert times == [EXPECTED] * 9


@pytest.mark.parametrize("passes", [2, 5])
def test_micro_batches_add_up(tmp_path: Path, clock: Time, passes: int) -> None:
    model = Model(clock)
    times = usage_of(tmp_path, model, lambda logger: train(model, clock, passes=passes))
    forward, backward = passes * (FORWARD_S + LOSS_S), passes * BACKWARD_S
    expected = passes * WAIT_S, forward, backward, CLIP_S + OPTIMIZER_S
    assert times == [pytest.approx(expected)] * 9


def test_another_model_that_trains_in_between_is_not_waited_for(
    tmp_path: Path, clock: Time
) -> None:
    model, other = Model(clock), Model(clock)
    optimizer = optimizer_of(other, clock)

    def train_other(step: int) -> None:
        loss_of(other, torch.rand(8, 4), clock).backward()
        optimizer.step()

    times = usage_of(tmp_path, model, lambda logger: train(model, clock, between=train_other))
    assert times == [EXPECTED] * 9


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

    times = usage_of(tmp_path, parts, loop)
    # Waiting begins again at a call without gradients.
    expected = FORWARD_S, 4 * FORWARD_S, 4 * BACKWARD_S, 2 * OPTIMIZER_S
    assert times[-3:] == [pytest.approx(expected)] * 3


def test_a_validation_is_no_wait(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)

    def in_a_phase(logger: HookLogger) -> Callable[[int], None]:
        def validate(step: int) -> None:
            with logger.phase("validation"), torch.no_grad():
                for batch in batches(clock, 50):
                    model(batch)

        return validate

    times = usage_of(
        tmp_path / "phase", model, lambda log: train(model, clock, between=in_a_phase(log))
    )
    assert times == [EXPECTED] * 9

    def validate(step: int) -> None:
        model.eval()
        for batch in batches(clock, 50):
            model(batch)
        model.train()

    times = usage_of(tmp_path / "bare", model, lambda log: train(model, clock, between=validate))
    # The last of its calls ends when training waits again.
    assert [wait for wait, *_ in times] == pytest.approx([WAIT_S + FORWARD_S] * 9)


def test_time_of_the_logger_is_no_wait(
    tmp_path: Path, clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    from telemetry.capture.light_step import LightReader

    for name in ("read", "completed"):
        method = getattr(LightReader, name)

        def slow(self: Any, *args: Any, method: Any = method) -> Any:
            clock.passes(7.0)
            return method(self, *args)

        monkeypatch.setattr(LightReader, name, slow)
    model = Model(clock)
    assert usage_of(tmp_path, model, lambda logger: train(model, clock)) == [EXPECTED] * 9


def test_one_in_five_of_short_steps_is_measured(tmp_path: Path, clock: Time) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    recorder = Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=100):
        for _ in range(80):
            clock.passes(1e-3)
            model(torch.rand(8, 4)).sum().backward()
            clock.passes(2e-3)
            optimizer.step()
    found = [record.usage for record in recorder.records if TIMES[0] in record.usage]
    assert len(found) == 16
    assert [usage[TIMES[0]] for usage in found] == pytest.approx([1e-3] * 16)


def test_a_model_that_is_never_called_has_no_times(tmp_path: Path, clock: Time) -> None:
    model = nn.Linear(4, 4)
    recorder = Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(model, tmp_path, alerts=[recorder]):
        for batch in batches(clock, 20):
            F.linear(batch, model.weight).sum().backward()
            optimizer.step()
    assert all(TIMES[0] not in record.usage for record in recorder.records)
    assert recorder.records[3].usage[HOST_BYTES] > 0


def test_tokens_are_counted_where_the_model_takes_indices(tmp_path: Path, clock: Time) -> None:
    class Words(Model):
        def forward(self, tokens: Tensor) -> Tensor:
            return super().forward(F.one_hot(tokens, 4).float())

    model = Words(clock)
    optimizer, recorder = optimizer_of(model, clock), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=5):
        for step in range(11):
            clock.passes(WAIT_S)
            given = torch.randint(4, (2, 10 + step))
            (model(given) if step % 2 else model(tokens=given)).sum().backward()
            optimizer.step()
    assert [r.tokens for r in recorder.records[1:]] == [2 * (10 + step) for step in range(1, 11)]
    table = telemetry.read(tmp_path).scalars
    rates = table[table.tag == "time/tokens_per_s"]
    step_s = WAIT_S + FORWARD_S + BACKWARD_S + OPTIMIZER_S
    # Means of steps 1 to 4, and 6 to 9: full steps count only where there are no others.
    assert rates.step.tolist() == [5, 10]
    assert rates.value.tolist() == pytest.approx([25 / step_s, 35 / step_s], rel=1e-6)


def test_another_thread_or_a_copy_is_no_training(tmp_path: Path, clock: Time) -> None:
    model = Model(clock)
    twin = copy.deepcopy(model)

    def elsewhere(step: int) -> None:
        twin(torch.rand(8, 4)).sum().backward()
        thread = threading.Thread(target=model, args=(torch.rand(8, 4),))
        thread.start()
        thread.join()
        clock.passes(-FORWARD_S)

    times = usage_of(tmp_path, model, lambda log: train(model, clock, between=elsewhere))
    assert times == [EXPECTED] * 9


@needs_observable_graphs
def test_a_compiled_model_is_seen_from_outside(tmp_path: Path, clock: Time) -> None:
    torch._dynamo.reset()
    inside = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    model = torch.compile(inside, backend="eager")
    optimizer, recorder = optimizer_of(model, clock), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=3):
        for batch in batches(clock, 6):
            loss_of(model, batch, clock).backward()
            optimizer.step()
        assert not inside._forward_pre_hooks
    assert not model._forward_pre_hooks
    light = [record.usage for record in recorder.records if not record.full]
    expected = pytest.approx((WAIT_S, LOSS_S, 0.0, OPTIMIZER_S))
    assert [tuple(usage[tag] for tag in TIMES) for usage in light] == [expected] * 4
    torch._dynamo.reset()


def test_no_hook_is_left(tmp_path: Path, clock: Time) -> None:
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
    # Modules inside of a call run without global hooks, unless the step is full.
    assert inside[2:8] == [0] * 6


def test_training_is_left_alone(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for step in range(12):
            for _ in range(1 + step % 3):
                loss = F.mse_loss(model(torch.rand(8, 4)), torch.rand(8, 4))
                loss.backward()
            yield loss
            yield from [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()

    outcome = assert_left_alone(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4)),
        loop,
        tmp_path,
        every_n_steps=4,
    )
    assert outcome.records[-1].usage


def test_waits_of_a_sleeping_loader_are_found(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer, recorder = torch.optim.SGD(model.parameters(), lr=0.01), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=100):
        for _ in range(30):
            time.sleep(0.03)
            model(torch.rand(8, 4)).sum().backward()
            optimizer.step()
    waits = [record.usage[TIMES[0]] for record in recorder.records[1:]]
    assert len(waits) == 29
    assert sum(waits) == pytest.approx(29 * 0.03, rel=0.2)  # drawing a batch is part of the wait


def test_memory_follows_what_the_loop_keeps(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    optimizer, recorder = torch.optim.SGD(model.parameters(), lr=0.01), Recorder()
    kept: list[Tensor] = []
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=10):
        for _ in range(30):
            model(torch.rand(8, 4)).sum().backward()
            kept.append(torch.ones(2**20))
            optimizer.step()
            time.sleep(0.01)
    memory = [record.usage[HOST_OWN_BYTES] for record in recorder.records]
    # The system may take pages back where memory is short.
    assert 2 * 30 * 2**20 < memory[-1] - memory[0] < 5 * 30 * 2**20
    table = telemetry.read(tmp_path).scalars
    assert len(table[table.tag == HOST_BYTES]) == 3


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
    recorder = Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=5):
        train(model, device_time, steps=21)
    assert Event.synchronized >= 20
    light = [record.usage for record in recorder.records if not record.full]
    assert [tuple(usage[tag] for tag in TIMES) for usage in light] == [EXPECTED] * len(light)
    known = [r.usage for r in recorder.records if ALLOCATED_BYTES in r.usage]
    assert len(known) == 2
    assert known[0][PEAK_BYTES] == 3000
    table = telemetry.read(tmp_path).scalars
    assert table[table.tag == ALLOCATED_BYTES].value.tolist() == [1000.0] * 3


def test_a_failing_event_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(**options: bool) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr("torch.cuda.Event", fail)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    failures = Failures()
    clock = LoopClock(nn.Linear(4, 4), failures)
    clock.measure(torch.device("cuda", 0))
    clock.start()
    clock.lap(1)
    assert clock.take() is None
    assert "to measure the time of a step" in caplog.text
    clock.stop()


def test_laps_without_steps_have_no_times() -> None:
    laps = Laps([1.0] * 6, [], 0, 0, (5, 6))
    assert laps.usage() == {ALLOCATED_BYTES: 5, PEAK_BYTES: 6}


def test_waiting_for_a_cpu_is_not_waiting_for_data(monkeypatch: pytest.MonkeyPatch) -> None:
    # At the begin of each step, after another model's pass, and at the begin of the forward pass.
    without_cpu = iter([1.0, 1.001, 1.002, 2.0, 3.0, 3.004, 3.0, 3.1, 3.12, 4.0])
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: next(without_cpu))
    model, waits = nn.Linear(4, 4), []
    clock = LoopClock(model, Failures())
    clock.start()
    for _ in range(3):
        clock.restart_wait()
        time.sleep(0.05)
        clock.before_call(model, (torch.ones(2, 4),))
        clock.end_step()
        laps = clock.take()
        waits.append(0.0 if laps is None else laps.seconds[0] - laps.usage()[TIMES[0]])
        clock.begin_step()
    clock.stop()
    assert waits == [0.0, pytest.approx(0.004), pytest.approx(0.020)]


@pytest.mark.skipif(not Path("/proc/thread-self/schedstat").exists(), reason="Linux counts it")
def test_a_thread_that_shares_a_cpu_waits_for_it() -> None:
    cpu = min(os.sched_getaffinity(0))
    other = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass"
    measured = list[float]()

    def share_the_cpu() -> None:
        os.sched_setaffinity(0, {cpu})  # of this thread
        waits = CpuWaits()
        before, end = waits.seconds(), time.monotonic() + 0.5
        while time.monotonic() < end:
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
    assert measured[0] > 0.1


def test_a_summary_tells_the_parts_of_a_step(
    tmp_path: Path, clock: Time, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(clock)
    usage_of(tmp_path, model, lambda logger: train(model, clock))
    assert main(["summary", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    total_s = WAIT_S + FORWARD_S + LOSS_S + BACKWARD_S + CLIP_S + OPTIMIZER_S
    assert f"a step takes {total_s:.2g}" in printed
    assert f" {WAIT_S / total_s:.0%}, " in printed
    assert "MiB" in printed


def test_waiting_for_a_cpu_apart_from_the_wait_does_not_shorten_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Begin and end of the first step; begin of the second, its evaluation, and its forward pass.
    without_cpu = iter([0.0, 0.0, 0.0, 0.001, 1.0, 1.002])
    monkeypatch.setattr(CpuWaits, "seconds", lambda self: next(without_cpu))
    model = nn.Linear(4, 4)
    clock = LoopClock(model, Failures())
    clock.start()
    clock.end_step()
    clock.take()
    clock.begin_step()
    clock.lap(APART)
    clock.wait()
    time.sleep(0.05)
    clock.before_call(model, (torch.ones(2, 4),))
    clock.end_step()
    laps = clock.take()
    clock.stop()
    assert laps is not None
    assert laps.no_cpu_s == pytest.approx(0.003)

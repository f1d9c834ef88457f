"""Background thread: order, bounds, forks and failures."""

from __future__ import annotations

import os
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from tensorboard.compat.proto.event_pb2 import Event

from telemetry.alert import Alert
from telemetry.capture.captured_step import CapturedStep, RunTotals
from telemetry.events.background import BackgroundWriter
from telemetry.events.summaries import event_of
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps, LoggedScalars, Pipeline, Processor
from telemetry.pipeline import queue as pipeline_module
from telemetry.pipeline.processing import Sink as AnySink
from telemetry.records import Layout, Module, Parameter, StepRecord
from telemetry.records.loss import LossChoice
from telemetry.rule import AnyRule, Rule, as_rule
from telemetry.tag_names import plain
from telemetry.writing.dashboard import Dashboard
from tests.helpers.serialized import summary_of

LAYOUT = Layout(
    modules=(Module(name="layer", type_name="Linear"),),
    parameters=(Parameter(name="weight", module_name="layer", shape=(3,)),),
)


class Sink:
    """Sink that stores the written values; ``gate`` blocks the background thread."""

    def __init__(self) -> None:
        self.written: list[tuple[int, list[str], bool]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False
        self._changed = threading.Condition()

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[bytes] = (),
    ) -> None:
        assert self.gate.wait(30)
        if self.fails:
            raise OSError("no space left on device")
        with self._changed:
            self.written.append(
                (step, [plain(value.tag) for value in summary_of(values).value], droppable)
            )
            self._changed.notify_all()

    def has_received(self, prefix: str) -> bool:
        """Wait for a value whose tag starts with ``prefix``."""
        with self._changed:
            return self._changed.wait_for(
                lambda: any(tag.startswith(prefix) for _, tags, _ in self.written for tag in tags),
                30,
            )

    @property
    def steps(self) -> list[int]:
        return [step for step, tags, _ in self.written if "grad_norm/total" in tags]


@pytest.fixture
def sink() -> Sink:
    return Sink()


def make(
    sink: AnySink,
    *rules: AnyRule,
    reported: list[Alert] | None = None,
    dashboard: Dashboard | None = None,
    full_steps: FullSteps | None = None,
) -> Pipeline:
    alerts = [] if reported is None else reported
    return make_pipeline(
        dashboard=dashboard or Dashboard(),
        sink=sink,
        rules=[as_rule(rule) for rule in rules],
        on_alert=lambda alert, wall_time: alerts.append(alert),
        full_steps=full_steps,
    )


def make_pipeline(
    *,
    dashboard: Dashboard,
    sink: AnySink,
    rules: Sequence[Rule],
    on_alert: Callable[[Alert, float], None],
    full_steps: FullSteps | None = None,
) -> Pipeline:
    failures, full_steps = Failures(), full_steps or FullSteps(10)
    processor = Processor(
        dashboard=dashboard,
        sink=sink,
        rules=rules,
        on_alert=on_alert,
        full_steps=full_steps,
        failures=failures,
        loss=LossChoice(),
    )
    return Pipeline(processor, failures)


def captured(step: int, *, full: bool = False, wall_time: float = 0.0) -> CapturedStep:
    captured = CapturedStep(
        step=step,
        full=full,
        wall_time=wall_time,
        layout=LAYOUT,
        totals=RunTotals(),
        failures=Failures(),
    )
    if full:
        observations = captured.detail.observations
        observations.add("weights", "weight", torch.ones(10), observations.all)
        observations.finish()
    return captured


def scalars(step: int, **values: float) -> LoggedScalars:
    return LoggedScalars(step=step, wall_time=0.0, values=values)


def an_alert(step: int) -> Alert:
    return Alert(
        kind="nonfinite",
        severity="warning",
        step=step,
        module_name=None,
        value=np.nan,
        threshold=0.0,
        summary="planted",
    )


def test_flush_returns_after_all_steps_are_written_in_order(sink: Sink) -> None:
    pipeline = make(sink)
    for step in range(5):
        pipeline.submit(captured(step))
    pipeline.flush()
    assert sink.steps == [0, 1, 2, 3, 4]
    pipeline.close()


@pytest.mark.slow
def test_thousands_of_queued_light_steps_are_all_checked(sink: Sink) -> None:
    watch = Watch()
    pipeline = make(sink, watch)
    sink.gate.clear()
    for step in range(5000):
        pipeline.submit(captured(step))
    sink.gate.set()
    pipeline.close()
    assert watch.steps == sink.steps == list(range(5000))
    assert (pipeline.downgraded, pipeline.dropped) == (0, 0)


def test_a_queued_step_allocates_about_the_counted_bytes(sink: Sink) -> None:
    kept = [captured(step) for step in range(1000)]
    tracemalloc.start()
    kept = [captured(step) for step in range(1000)]
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(step.nbytes for step in kept) == pytest.approx(allocated, rel=0.5)


def test_steps_above_the_first_high_water_mark_are_downgraded_and_checked(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline_module, "MAX_DETAIL_BYTES", 0)
    seen: list[StepRecord] = []

    def rule(record: StepRecord) -> Iterator[Alert]:
        seen.append(record)
        yield from ()

    pipeline = make(sink, rule)
    sink.gate.clear()
    for step in range(4):
        pipeline.submit(captured(step, full=True))
    sink.gate.set()
    pipeline.close()
    assert [record.step for record in seen] == [0, 1, 2, 3]
    assert [(record.full, len(record.weights)) for record in seen] == [(True, 1), *[(False, 0)] * 3]
    assert sink.steps == [0, 1, 2, 3]
    assert caplog.text.count("is recorded with its norms alone") == 1
    assert "3 steps were recorded with their norms alone" in caplog.text


def test_steps_above_the_second_high_water_mark_are_dropped_counted_and_logged(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline_module, "MAX_BYTES", 3 * captured(0).nbytes - 1)
    pipeline = make(sink)
    sink.gate.clear()
    for step in range(10):
        pipeline.submit(captured(step))
        pipeline.submit_logged(scalars(step, accuracy=0.5))
    sink.gate.set()
    pipeline.close()
    assert sink.steps == [0, 1, 2]
    assert sum("accuracy" in tags for _, tags, _ in sink.written) == 10
    assert caplog.text.count("is not recorded") == 1
    assert "7 steps were dropped" in caplog.text


def test_measurements_may_be_dropped_by_the_writer_and_users_scalars_not(sink: Sink) -> None:
    pipeline = make(sink, lambda record: [an_alert(record.step)])
    pipeline.submit(captured(0))  # contains the layout, which readers need
    pipeline.submit_logged(scalars(1, loss=1.0))
    pipeline.submit(captured(1))
    pipeline.close()
    droppable = {
        (step, tag.partition("/")[0]): may_drop
        for step, tags, may_drop in sink.written
        for tag in tags
    }
    assert droppable[1, "grad_norm"]
    assert not droppable[0, "grad_norm"]
    assert not droppable[1, "loss"]
    assert not droppable[1, "~alerts"]


def test_the_record_of_a_step_has_the_scalars_logged_for_it(sink: Sink) -> None:
    seen: list[StepRecord] = []

    def rule(record: StepRecord) -> Iterator[Alert]:
        seen.append(record)
        yield from ()

    pipeline = make(sink, rule)
    pipeline.submit_logged(scalars(0, loss=3.0))
    pipeline.submit_logged(scalars(0, accuracy=0.1))
    pipeline.submit(captured(0))
    pipeline.submit(captured(1))
    pipeline.close()
    assert [record.scalars for record in seen] == [{"loss": 3.0, "accuracy": 0.1}, {}]


def test_a_rule_receives_losses_that_no_step_follows(sink: Sink) -> None:
    class Watcher(Rule):
        def __call__(self, record: StepRecord) -> Iterator[Alert]:
            yield from ()

        def on_loss(self, step: int, loss: float) -> Iterator[Alert]:
            if loss > 1:
                yield an_alert(step)

    reported: list[Alert] = []
    pipeline = make(sink, Watcher(), reported=reported)
    pipeline.submit_logged(scalars(7, loss=2.0))
    pipeline.close()
    assert [alert.step for alert in reported] == [7]


def test_a_rule_can_request_a_full_step(sink: Sink) -> None:
    class Curious(Rule):
        requests_full_step = False

        def __call__(self, record: StepRecord) -> Iterator[Alert]:
            self.requests_full_step = record.step in {1, 20, 21}
            yield from ()

    full_steps = FullSteps(1000)
    pipeline = make(sink, Curious(), full_steps=full_steps)
    full = []
    for step in range(30):
        if full_steps(step):
            full.append(step)
        pipeline.submit(captured(step))
        pipeline.flush()
    pipeline.close()
    assert full == [0, 2, 21, 22]


def test_full_steps_requested_by_slow_rules_run_as_soon_as_they_return(sink: Sink) -> None:
    class Curious(Rule):
        requests_full_step = False

        def __call__(self, record: StepRecord) -> Iterator[Alert]:
            self.requests_full_step = record.step in {1, 2}
            yield from ()

    full_steps = FullSteps(1000)
    pipeline = make(sink, Curious(), full_steps=full_steps)
    sink.gate.clear()
    for step in range(10):
        assert full_steps(step) == (step == 0)
        pipeline.submit(captured(step))
    sink.gate.set()
    pipeline.flush()
    assert [full_steps(step) for step in range(10, 14)] == [True, True, False, False]
    pipeline.close()


class Watch(Rule):
    """Rule that stores the numbers of the steps it receives."""

    requests_full_step = False

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        self.steps.append(record.step)
        yield from ()


# --- pending values ------------------------------------------------------------------------------


def test_norms_of_the_last_steps_are_written_without_a_later_step(sink: Sink) -> None:
    pipeline = make(sink)
    for step in range(3):
        pipeline.submit(captured(step, wall_time=time.time()))
    assert sink.has_received("telemetry/n/")
    pipeline.close()
    blocks = [tags for _, tags, _ in sink.written if any("telemetry/n/" in tag for tag in tags)]
    assert len(blocks) == 1


def test_the_worker_sleeps_while_no_values_are_pending(sink: Sink) -> None:
    class Watched(Dashboard):
        polled = threading.Event()

        def pending_s(self, now: float) -> float | None:
            self.polled.set()
            return super().pending_s(now)

        def pending_values(self) -> tuple[int, Sequence[bytes]]:
            self.polled.set()
            return super().pending_values()

    dashboard = Watched()
    pipeline = make(sink, dashboard=dashboard)
    pipeline.submit(captured(0, wall_time=time.time()))
    assert sink.has_received("telemetry/n/")
    pipeline.flush()
    pipeline.submit_logged(scalars(1, accuracy=0.5))
    assert sink.has_received("accuracy")
    for _ in range(20):
        dashboard.polled.clear()
        if not dashboard.polled.wait(0.3):
            break
    else:
        pytest.fail("the worker wakes without pending values")
    pipeline.close()


# --- a disk that hangs ---------------------------------------------------------------------------


class HangingDisk:
    """Sink whose writing thread hangs until ``answering`` is set."""

    def __init__(self) -> None:
        self.answering = threading.Event()
        self.written: list[Event] = []
        self.background = BackgroundWriter(
            self, name="runs/x", flush_s=3600.0, max_pending_bytes=1 << 20
        )

    def write_values(
        self,
        values: Sequence[bytes],
        step: int,
        wall_time: float,
        *,
        droppable: bool = False,
        flush: bool = False,
        repeat: Sequence[bytes] = (),
    ) -> None:
        event = event_of(values, step, wall_time)
        self.background.put(event, droppable=droppable, flush=flush)

    def write(self, records: deque[bytes], *, urgent: bool) -> None:
        assert self.answering.wait(30)
        while records:
            self.written.append(Event.FromString(records.popleft()))

    def close(self) -> None: ...


@pytest.mark.slow
def test_rules_check_each_step_and_alerts_are_reported_while_the_disk_hangs() -> None:
    disk, watch, reported = HangingDisk(), Watch(), []
    pipeline = make(disk, watch, lambda record: [an_alert(record.step)], reported=reported)
    for step in range(2000):
        pipeline.submit(captured(step))
    pipeline.flush()
    assert watch.steps == list(range(2000))
    assert [alert.step for alert in reported] == list(range(2000))
    assert disk.written == []
    disk.answering.set()
    pipeline.close()
    disk.background.close()
    alerts = [e.step for e in disk.written if e.summary.value[0].tag.startswith("~alerts/")]
    assert alerts == list(range(2000))


def test_steps_queued_after_a_rule_that_hangs_are_counted_after_the_timeout(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    entered, may_continue = threading.Event(), threading.Event()

    def rule(record: StepRecord) -> Iterator[Alert]:
        entered.set()
        assert may_continue.wait(30)
        yield from ()

    pipeline = make(sink, rule)
    for step in range(5):
        pipeline.submit(captured(step))
    assert entered.wait(30)
    pipeline.flush(0.01)
    assert pipeline.is_late
    pipeline.close(0.01)
    assert "telemetry: 5 steps were not judged within 0.01 s" in caplog.messages
    may_continue.set()
    pipeline._thread.join(30)
    assert sink.steps == [0]  # the step at which the rule hung; the writer may be closed by now


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_message_about_a_worker_that_has_died_names_no_timeout(
    sink: Sink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processor, "pending_s", sys.exit)
    pipeline = make(sink)
    pipeline.submit(captured(0))
    pipeline.close()
    pipeline._thread.join(30)
    assert caplog.messages == ["telemetry: 1 steps were not judged"]


def test_a_call_on_the_worker_that_raises_returns_none_before_the_timeout(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise ValueError("no state")

    pipeline = make(sink)
    assert pipeline.run_on_worker(fail) is None
    assert pipeline.run_on_worker(lambda: 3) == 3
    pipeline.close()
    assert "no state" in caplog.text
    assert "take longer" not in caplog.text


@pytest.mark.parametrize("at_loss", [False, True])
def test_a_rule_or_callback_that_exits_does_not_end_the_worker(
    sink: Sink, caplog: pytest.LogCaptureFixture, at_loss: bool
) -> None:
    class Planted(Watch):
        def on_loss(self, step: int, loss: float) -> Iterator[Alert]:
            if at_loss:
                yield an_alert(step)
                sys.exit(1)

    def rule(record: StepRecord) -> Iterator[Alert]:
        if not at_loss:
            yield an_alert(record.step)
            sys.exit(1)

    reported: list[Alert] = []

    def callback(alert: Alert, wall_time: float) -> None:
        reported.append(alert)
        sys.exit(1)

    rules = [as_rule(rule), watch := Planted()]
    pipeline = make_pipeline(dashboard=Dashboard(), sink=sink, rules=rules, on_alert=callback)
    for step in range(3):
        pipeline.submit_logged(scalars(step, loss=1.0))
        pipeline.submit(captured(step))
    assert pipeline.run_on_worker(sys.exit) is None
    pipeline.close()
    assert sink.steps == watch.steps == [alert.step for alert in reported] == [0, 1, 2]
    assert caplog.text.count("to call on_alert") == caplog.text.count("to apply the rule") == 1


def test_two_pipelines_that_flush_each_other_do_not_deadlock(sink: Sink) -> None:
    met, done = threading.Barrier(2), threading.Barrier(3)
    pipelines: list[Pipeline] = []

    def flush_both(alert: Alert) -> None:
        met.wait(20)
        for pipeline in pipelines:
            pipeline.flush()
        done.wait(20)

    pipelines += [
        make_pipeline(
            dashboard=Dashboard(),
            sink=sink,
            rules=[as_rule(lambda record: [an_alert(record.step)])],
            on_alert=lambda alert, wall_time: flush_both(alert),
        )
        for _ in range(2)
    ]
    for pipeline in pipelines:
        pipeline.submit(captured(0))
    done.wait(20)
    for pipeline in pipelines:
        pipeline.close()


def test_a_failing_writer_is_logged_once_and_later_steps_are_recorded(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    pipeline = make(sink)
    sink.fails = True
    pipeline.submit(captured(0))
    pipeline.submit(captured(1))
    pipeline.flush()
    sink.fails = False
    pipeline.submit(captured(2))
    pipeline.close()
    assert sink.steps == [2]
    assert caplog.text.count("telemetry failed to record a step") == 1


def test_steps_and_scalars_submitted_after_close_are_not_written(sink: Sink) -> None:
    pipeline = make(sink)
    pipeline.close()
    pipeline.submit(captured(0))
    pipeline.submit_logged(scalars(0, loss=1.0))
    pipeline.flush()
    pipeline.close()
    assert sink.written == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_neither_writes_nor_hangs(sink: Sink) -> None:
    pipeline = make(sink)
    child = os.fork()
    if child == 0:
        pipeline.submit(captured(0))
        pipeline.flush()
        pipeline.close()
        os._exit(7)
    deadline = time.monotonic() + 30
    while (done := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(done[1]) == 7
    pipeline.submit(captured(1))
    pipeline.close()
    assert sink.steps == [1]

"""The background thread: order, bounds, forks, and what happens when something fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from tensorboard.compat.proto.summary_pb2 import Summary

from telemetry import pipeline as pipeline_module
from telemetry.board import Board
from telemetry.capture.captured import CapturedStep, RunTotals
from telemetry.capture.window import Window
from telemetry.faults import Faults
from telemetry.measure import Measurer
from telemetry.pipeline import LoggedScalars, Pipeline
from telemetry.records import Alert, Layout, Rule, StepRecord

LAYOUT = Layout(modules=(), parameters=())


class Sink:
    """Keeps what is written; ``gate`` holds the background thread up."""

    def __init__(self) -> None:
        self.written: list[tuple[int, list[str], bool]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fails = False

    def __call__(
        self, values: Sequence[Summary.Value], *, step: int, wall_time: float, droppable: bool
    ) -> None:
        assert self.gate.wait(30)
        if self.fails:
            raise OSError("no space left on device")
        self.written.append((step, [value.tag for value in values], droppable))

    @property
    def steps(self) -> list[int]:
        return [step for step, tags, _ in self.written if "grad_norm/total" in tags]


@pytest.fixture
def sink() -> Sink:
    return Sink()


def make(sink: Sink, *rules: Rule, told: list[Alert] | None = None) -> Pipeline:
    alerts = [] if told is None else told
    return Pipeline(
        board=Board(),
        sink=sink,
        flush_sink=lambda: None,
        rules=rules,
        on_alert=lambda alert, wall_time: alerts.append(alert),
        faults=Faults(),
    )


def captured(step: int, *, full: bool = False) -> CapturedStep:
    window = Window(step=step, measurer=Measurer() if full else None)
    return CapturedStep.of(
        window, wall_time=0.0, layout=LAYOUT, totals=RunTotals(), faults=Faults()
    )


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
        message="planted",
    )


def test_steps_are_written_in_order_by_the_time_flush_returns(sink: Sink) -> None:
    pipeline = make(sink)
    for step in range(5):
        pipeline.submit(captured(step))
    pipeline.flush()
    assert sink.steps == [0, 1, 2, 3, 4]
    pipeline.close()


def test_steps_that_do_not_fit_are_dropped_counted_and_told(
    sink: Sink, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pipeline_module, "MAX_STEPS_WAITING", 3)
    pipeline = make(sink)
    sink.gate.clear()
    for step in range(10):
        pipeline.submit(captured(step))
        pipeline.submit_logged(scalars(step, accuracy=0.5))
    dropped = pipeline.dropped
    sink.gate.set()
    pipeline.close()
    assert dropped >= 6
    assert len(sink.steps) == 10 - dropped
    assert sum("accuracy" in tags for _, tags, _ in sink.written) == 10
    assert caplog.text.count("is not recorded") == 1
    assert f"{dropped} steps were dropped" in caplog.text


def test_measurements_may_be_dropped_by_the_writer_and_users_scalars_not(sink: Sink) -> None:
    pipeline = make(sink, lambda record: [an_alert(record.step)])
    pipeline.submit(captured(0))  # takes the layout along, without which nothing can be read
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
    assert not droppable[1, "alert"]


def test_a_step_gets_the_scalars_logged_for_it(sink: Sink) -> None:
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


def test_a_rule_hears_of_losses_that_no_step_follows(sink: Sink) -> None:
    class Rule:
        def __call__(self, record: StepRecord) -> Iterator[Alert]:
            yield from ()

        def on_loss(self, step: int, loss: float) -> Iterator[Alert]:
            if loss > 1:
                yield an_alert(step)

    told: list[Alert] = []
    pipeline = make(sink, Rule(), told=told)
    pipeline.submit_logged(scalars(7, loss=2.0))
    pipeline.close()
    assert [alert.step for alert in told] == [7]


def test_a_rule_can_ask_for_a_full_measurement(sink: Sink) -> None:
    class Rule:
        wants_full = False

        def __call__(self, record: StepRecord) -> Iterator[Alert]:
            self.wants_full = record.step == 1
            yield from ()

    pipeline = make(sink, Rule())
    wanted = []
    for step in range(3):
        pipeline.submit(captured(step))
        pipeline.flush()
        wanted.append(pipeline.full_wanted)
    pipeline.close()
    assert wanted == [False, True, False]


class Watch:
    """A rule that tells which steps it has seen."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.wants_full = False
        self._changed = threading.Condition()

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        with self._changed:
            self.steps.append(record.step)
            self._changed.notify_all()
        yield from ()

    def has_seen(self, count: int) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.steps) >= count, 30)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time limit lets the background thread begin."""
    monkeypatch.setattr(pipeline_module, "FEW_S", 3600.0)


@pytest.mark.usefixtures("patient")
def test_steps_that_are_not_measured_in_full_are_taken_a_few_at_a_time(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "FEW", 4)
    watch = Watch()
    pipeline = make(sink, watch)
    for step in range(3):
        pipeline.submit(captured(step))
    assert watch.steps == []
    pipeline.submit(captured(3))
    assert watch.has_seen(4)
    pipeline.close()


def test_nothing_waits_for_long(sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "FEW_S", 0.01)
    watch = Watch()
    pipeline = make(sink, watch)
    pipeline.submit(captured(0))
    assert watch.has_seen(1)
    pipeline.close()


@pytest.mark.usefixtures("patient")
def test_a_step_that_is_measured_in_full_is_taken_at_once(sink: Sink) -> None:
    watch = Watch()
    pipeline = make(sink, watch)
    pipeline.submit(captured(0))
    pipeline.submit(captured(1, full=True))
    assert watch.has_seen(2)
    pipeline.close()


@pytest.mark.usefixtures("patient")
def test_every_step_is_taken_at_once_while_a_rule_is_suspicious(sink: Sink) -> None:
    watch = Watch()
    pipeline = make(sink, watch)
    watch.wants_full = True
    pipeline.submit(captured(0))
    pipeline.flush()
    pipeline.submit(captured(1))
    assert watch.has_seen(2)
    pipeline.close()


def test_a_writer_that_fails_is_told_once_and_the_next_steps_are_taken(
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


def test_nothing_is_taken_after_close(sink: Sink) -> None:
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

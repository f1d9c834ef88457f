"""Queue between training and the worker: its limits in bytes, and when the worker wakes."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import telemetry
from telemetry import Alert, HookLogger, StepRecord
from telemetry.capture.captured_step import CapturedStep, RunTotals
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps, LoggedScalars, Pipeline, Processor, queue
from telemetry.records.loss import LossChoice
from telemetry.rule import as_rule
from telemetry.tag_names import plain
from telemetry.writing.dashboard import Dashboard
from tests.helpers.figures import figures
from tests.helpers.serialized import summary_of
from tests.helpers.twins import Recorder

WATCHDOG_S = 120


def captured(step: int, wall_time: float = 0.0) -> CapturedStep:
    return CapturedStep(step=step, wall_time=wall_time, totals=RunTotals(), failures=Failures())


def test_a_queued_step_allocates_about_the_counted_bytes() -> None:
    kept = [captured(step) for step in range(1000)]
    tracemalloc.start()
    kept = [captured(step) for step in range(1000)]
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(step.nbytes for step in kept) == pytest.approx(allocated, rel=0.5)


# --- backpressure: a rule blocks the worker ------------------------------------------------------


def train_ahead(log_dir: Path, steps: int, every: int) -> list[StepRecord]:
    """Return the records of steps that end while the rule has not judged the first one."""
    may_judge, entered = threading.Event(), threading.Event()

    def blocked(record: StepRecord) -> Iterable[Alert]:
        entered.set()
        assert may_judge.wait(WATCHDOG_S)
        return ()

    model, recorder = nn.Linear(3, 2), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with HookLogger(
        model, log_dir, alerts=[blocked, recorder], every_n_steps=every, images=False
    ) as logger:
        for _ in range(steps):
            model(torch.ones(2, 3)).square().mean().backward()
            logger.log(accuracy=0.5)
            optimizer.step()
            assert entered.wait(WATCHDOG_S)
        may_judge.set()
    return recorder.records


def test_full_steps_above_the_first_high_water_mark_are_downgraded_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queue, "MAX_DETAIL_BYTES", 0)
    records = train_ahead(tmp_path, steps=4, every=1)
    assert [record.step for record in records] == [0, 1, 2, 3]
    assert [record.full for record in records] == [True, False, False, False]
    assert [len(record.weights) for record in records] == [2, 0, 0, 0]
    assert {*telemetry.read(tmp_path).layers["step"]} == {0, 1, 2, 3}
    at_once, at_close = [text for text in caplog.messages if "norms alone" in text]
    assert (figures(at_once)[0], figures(at_close)) == (1, [3])


def test_steps_above_the_second_high_water_mark_are_dropped_and_scalars_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes: list[int] = []
    submit = Pipeline.submit

    def spy(pipeline: Pipeline, step: CapturedStep) -> None:
        sizes.append(step.nbytes)
        if len(sizes) == 3:
            monkeypatch.setattr(queue, "MAX_BYTES", sum(sizes) - 1)
        submit(pipeline, step)

    monkeypatch.setattr(Pipeline, "submit", spy)
    records = train_ahead(tmp_path, steps=10, every=100)
    assert [record.step for record in records] == [0, 1, 2]
    scalars = telemetry.read(tmp_path).scalars
    assert scalars[scalars.tag == "accuracy"].step.tolist() == [*range(10)]
    [at_once] = [text for text in caplog.messages if "is not recorded" in text]
    [at_close] = [text for text in caplog.messages if "were dropped" in text]
    assert (figures(at_once)[0], figures(at_close)) == (3, [7])


# --- the queue alone -----------------------------------------------------------------------------


class Sink:
    """Sink that stores the written values."""

    def __init__(self) -> None:
        self.written: list[tuple[int, str, bool]] = []
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
        with self._changed:
            tags = [plain(value.tag) for value in summary_of(values).value]
            self.written += [(step, tag.partition("/")[0], droppable) for tag in tags]
            self._changed.notify_all()

    def wait_for(self, group: str) -> None:
        with self._changed:
            assert self._changed.wait_for(
                lambda: any(written == group for _, written, _ in self.written), WATCHDOG_S
            )


@pytest.fixture
def sink() -> Sink:
    return Sink()


def make(
    sink: Sink,
    rule: Callable[[StepRecord], Iterable[Alert]] = lambda record: (),
    dashboard: Dashboard | None = None,
) -> Pipeline:
    failures = Failures()
    processor = Processor(
        dashboard=dashboard or Dashboard(),
        sink=sink,
        rules=[as_rule(rule)],
        on_alert=lambda alert, wall_time: None,
        full_steps=FullSteps(10),
        failures=failures,
        loss=LossChoice(),
    )
    return Pipeline(processor, failures)


def test_measurements_may_be_dropped_by_the_writer_and_the_rest_may_not(sink: Sink) -> None:
    def rule(record: StepRecord) -> Iterator[Alert]:
        yield Alert(
            kind="planted",
            severity="note",
            step=record.step,
            module_name=None,
            value=0.0,
            threshold=0.0,
            summary="Planted.",
        )

    pipeline = make(sink, rule)
    pipeline.submit(captured(0))  # contains the layout, which readers need
    pipeline.submit_logged(LoggedScalars(step=1, wall_time=0.0, values={"loss": 1.0}))
    pipeline.submit(captured(1))
    pipeline.close()
    droppable = {(step, group): may_drop for step, group, may_drop in sink.written}
    assert droppable[1, "grad_norm"]
    for needed in [(0, "grad_norm"), (1, "loss"), (1, "~alerts")]:
        assert not droppable[needed]


def test_the_worker_sleeps_while_no_values_are_pending(sink: Sink) -> None:
    class Watched(Dashboard):
        polled = threading.Event()

        def pending_values(self) -> tuple[int, Sequence[bytes]]:
            self.polled.set()
            return super().pending_values()

    pipeline = make(sink, dashboard=Watched())
    pipeline.submit(captured(0))
    sink.wait_for("telemetry")
    pipeline.flush()
    Watched.polled.clear()
    assert not Watched.polled.wait(0.5)
    pipeline.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_message_about_a_worker_that_has_died_names_no_timeout(
    sink: Sink, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Processor, "pending_s", sys.exit)
    pipeline = make(sink)
    pipeline.submit(captured(0))
    pipeline.close()
    [message] = caplog.messages
    assert figures(message) == [1]


def test_a_call_on_the_worker_that_raises_returns_none_before_the_timeout(
    sink: Sink, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise ValueError("planted")

    pipeline = make(sink)
    assert pipeline.run_on_worker(fail) is None
    assert pipeline.run_on_worker(sys.exit) is None
    assert pipeline.run_on_worker(lambda: 3) == 3
    pipeline.close()
    assert "planted" in caplog.text
    assert "take longer" not in caplog.text

"""Rank 0 judges and writes merged steps, within bounds."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest

from telemetry.alert import Alert
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps, LoggedScalars, Pipeline, Processor
from telemetry.ranks import exchange
from telemetry.ranks.exchange import RankExchange
from telemetry.ranks.merging import MergedStep
from telemetry.ranks.partial_record import ParameterPart, PartialRecord
from telemetry.records import Layout, Module, Parameter, StepRecord
from telemetry.records.loss import LossChoice
from telemetry.rule import Rule
from telemetry.tag_names import plain
from telemetry.writing.dashboard import Dashboard
from tests.helpers.serialized import summary_of

LAYOUT = Layout(
    modules=(Module(name="layer", type_name="Linear"),),
    parameters=(Parameter(name="layer.weight", module_name="layer", shape=(4,)),),
)


def merged(step: int) -> MergedStep:
    """Return a light step of two ranks; rank 1 took longer and its loss is higher."""
    first, second = (
        PartialRecord(
            rank=rank,
            size=2,
            step=step,
            wall_time=float(step),
            parameters=ParameterPart(
                stage=0,
                layout_id="a",
                layout=LAYOUT if step == 0 else None,
                columns={
                    "copies": np.zeros(1, np.int64),
                    "norms": np.array([3.0]) * (1 - rank),
                    "present": np.ones(1, bool),
                    "finite": np.ones(1, bool),
                },
            ),
            scalars={"loss": 1.0 + rank},
            step_s=0.5 + rank,
        )
        for rank in (0, 1)
    )
    both = MergedStep(first)
    both.add(second)
    return both


class Watch(Rule):
    """Rule that stores the numbers of the steps it receives."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        self.steps.append(record.step)
        yield from ()


class RankZero:
    """Pipeline of rank 0; ``gate`` blocks the background thread."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.watch = Watch()
        self.values: list[tuple[int, str, float]] = []
        failures, full_steps = Failures(), FullSteps(100)
        processor = Processor(
            dashboard=Dashboard(),
            sink=self,
            rules=[self.watch],
            on_alert=print,
            full_steps=full_steps,
            failures=failures,
            loss=LossChoice(),
        )
        self.pipeline = Pipeline(processor, failures)
        self.ranks = processor.ranks = RankExchange(
            rank=0,
            size=2,
            put=self.pipeline.put_now,
            ask=full_steps.request_at,
            current_step=lambda: 0,
            failures=failures,
        )
        self.processor = processor

    def write_values(
        self, values: Sequence[bytes], step: int, wall_time: float, **_: object
    ) -> None:
        assert self.gate.wait(30)
        for value in summary_of(values).value:
            self.values.append((step, plain(value.tag), value.simple_value))

    def curve(self, tag: str) -> list[tuple[int, float]]:
        return [(step, value) for step, found, value in self.values if found == tag]


@pytest.fixture
def first() -> Iterator[RankZero]:
    rank = RankZero()
    yield rank
    rank.gate.set()
    rank.ranks.close(5.0)


def test_merged_steps_are_checked_and_written(first: RankZero) -> None:
    first.gate.set()
    for step in range(40):
        first.ranks.take(merged(step))
        if step == 0:
            first.pipeline.flush()
    first.pipeline.close()
    assert first.watch.steps == list(range(40))
    for tag, value in {
        "grad_norm/total": 3.0,
        "loss": 1.5,
        "rank_time/slowest": 1.5,
        "rank_time/slowest_rank": 1.0,
        "rank_spread/loss/min": 1.0,
        "rank_spread/loss/min_rank": 0.0,
        "rank_spread/loss/max": 2.0,
        "rank_spread/loss/max_rank": 1.0,
    }.items():
        assert first.curve(tag) == [(step, value) for step in range(40)], tag


def test_merged_steps_above_the_byte_limit_are_dropped_and_logged_once(
    first: RankZero, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exchange, "MAX_BYTES", 3 * merged(0).nbytes)
    for step in range(10):
        first.ranks.take(merged(step))
    first.gate.set()
    first.pipeline.close()
    steps = [step for step, _ in first.curve("grad_norm/total")]
    assert steps == list(range(len(steps)))
    assert 3 <= len(steps) <= 6
    assert caplog.text.count("is not recorded") == 1


def test_a_rank_that_only_logged_scalars_of_a_step_has_no_other_interval(
    first: RankZero, caplog: pytest.LogCaptureFixture
) -> None:
    few, full = merged(0).parts
    step = MergedStep(replace(few, parameters=None))
    step.add(replace(full, full=True))
    first.ranks.merged(step)
    assert "every_n_steps" not in caplog.text
    step = MergedStep(few)
    step.add(replace(full, full=True))
    first.ranks.merged(step)
    assert "every_n_steps" in caplog.text


def test_a_forked_child_does_not_block(first: RankZero) -> None:
    first.processor.log([LoggedScalars(step=0, wall_time=0.0, values={"loss": 1.0})])
    first.processor.send_rest()  # the other rank never sends a part
    child = os.fork()
    if child == 0:
        first.ranks.close(1e6)
        first.ranks.wait(1e6)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    first.gate.set()
    first.ranks.take(merged(0))

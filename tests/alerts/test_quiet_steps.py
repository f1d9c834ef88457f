"""Rules that pass over quiet steps together find and remember what judging each would have left."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pytest
from interrupted_runs import RUNS, train

from telemetry import Alert, StepRecord
from telemetry.alerts import default_rules
from telemetry.alerts.judging import Judge
from telemetry.failures import Failures
from telemetry.records import LightSteps


class Recorder:
    """A rule that keeps what it sees."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        self.records.append(record)
        yield from ()


class Replay:
    """Judges records of a run again.

    Attributes:
        passed: How many steps were passed over.
    """

    def __init__(self) -> None:
        self.failures = Failures()
        self.judge = Judge(default_rules(), self.failures)
        self.alerts: list[Alert] = []
        self.asked: list[int] = []
        self.passed = 0

    def one(self, record: StepRecord) -> None:
        if record.loss is not None:
            self.alerts += self.judge.judge_loss(record.step, record.loss)
        self.alerts += self.judge.judge(record)
        if self.judge.wants_full:
            self.asked.append(record.step)

    def several(self, records: Sequence[StepRecord]) -> None:
        passed = self.judge.pass_over(LightSteps.of(records))
        self.passed += passed
        for record in records[passed:]:
            self.one(record)


def parts(records: Sequence[StepRecord], seed: int) -> Iterator[tuple[bool, list[StepRecord]]]:
    """Records that are not full in groups of any sizes; the others alone."""
    sizes = random.Random(seed)
    for full, some in groupby(records, lambda record: record.full):
        rest = list(some)
        while rest:
            size = 1 if full else sizes.randint(1, 12)
            yield full, rest[:size]
            rest = rest[size:]


def remembered(replay: Replay) -> str:
    return repr(replay.judge.state_dict())  # NaN differs from itself


@pytest.mark.parametrize("name", RUNS)
def test_alerts_asks_and_memory_are_the_same(name: str, tmp_path: Path) -> None:
    recorder = Recorder()
    train(RUNS[name], tmp_path, rules=[*default_rules(), recorder])
    alone = Replay()
    for record in recorder.records:
        alone.one(record)
    assert alone.alerts or name == "healthy"
    passed = 0
    for seed in range(5):
        together = Replay()
        for full, some in parts(recorder.records, seed):
            together.one(some[0]) if full else together.several(some)
        assert together.alerts == alone.alerts
        assert together.asked == alone.asked
        assert remembered(together) == remembered(alone)
        assert together.failures.summary() == ""
        passed += together.passed
    assert passed > 0 or name == "vanishing"  # where something is wrong from the beginning


def test_most_steps_of_a_healthy_run_are_quiet(tmp_path: Path) -> None:
    recorder = Recorder()
    train(RUNS["healthy"], tmp_path, rules=[*default_rules(), recorder])
    replay = Replay()
    for full, some in parts(recorder.records, 0):
        replay.one(some[0]) if full else replay.several(some)
    assert replay.passed > len(recorder.records) / 2

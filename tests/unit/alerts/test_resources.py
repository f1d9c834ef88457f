"""Time and memory: faulty runs of each kind, and their healthy twins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import Alert, HookLogger, StepRecord
from telemetry.testing import alerts_of
from tests.helpers.rank_records import of_ranks
from tests.helpers.rules import rule
from tests.helpers.scripted import record
from tests.helpers.small_runs import Before, fit

MIB = 2**20
PARTS = "data_wait", "forward", "backward", "optimizer"
HOST, DEVICE = "memory/host_own_bytes", "memory/allocated_bytes"
Curve = Callable[[int], float]
Run = Iterator[StepRecord]


def timed(step: int, times: Iterable[float], tokens: float = 512.0) -> StepRecord:
    """Return a record of a step whose parts take these seconds."""
    usage = {f"time/{part}_s": seconds for part, seconds in zip(PARTS, times, strict=True)}
    return record(step, usage=usage, tokens=tokens, full=step % 100 == 0)


def noise(step: int) -> float:
    """Return a factor as of a busy machine: usually near 1, sometimes far above."""
    draws = np.random.default_rng(step)
    return float(np.exp(0.3 * draws.normal()) * (5 if draws.random() < 0.05 else 1))


def waiting(wait_s: Curve, scale: float = 1.0) -> Run:
    """Yield steps of 0.11 s beside the wait, each with noise."""
    for step in range(300):
        own = noise(2 * step) * scale
        yield timed(step, (wait_s(step) * noise(2 * step + 1), 0.03 * own, 0.06 * own, 0.02 * own))


def memory(mebibytes: Curve, tag: str = HOST, tokens: Curve = lambda step: 512.0) -> Run:
    """Yield steps with a memory of 500 MiB and this, which the batch lets vary."""
    every, varies = (1, 0.5) if tag == HOST else (10, 3.0)
    for step in range(1300):
        value = 500 + mebibytes(step) + varies * np.random.default_rng(step).random()
        usage = {tag: value * MIB} if step % every == 0 else {}
        yield record(step, usage=usage, tokens=tokens(step))


def found(kind: str, run: Iterable[StepRecord]) -> list[Alert]:
    return alerts_of(run, [rule(kind)])


def from_step(step: int, high: float, low: float = 1.0) -> Curve:
    return lambda at: high if at >= step else low


@pytest.mark.parametrize(
    ("wait_s", "scale"),
    [
        (lambda step: 0.2, 1.0),
        (from_step(100, 0.16, 0.001), 1.0),
        (lambda step: 0.02, 0.1),
        (lambda step: 0.3 if step % 4 else 0.0, 1.0),
    ],
    ids=["decodes images", "cold file system", "small network", "one worker in four keeps up"],
)
def test_steps_that_wait_for_data_are_reported_once(wait_s: Curve, scale: float) -> None:
    [alert] = found("input_bound", waiting(wait_s, scale))
    assert (alert.severity, alert.stage) == ("note", "started")
    assert 0.4 < alert.value < 1
    assert any("num_workers" in text for text in alert.advice)


@pytest.mark.parametrize(
    ("mebibytes", "tag", "severity"),
    [
        (lambda step: 0.3 * step, HOST, "note"),
        (lambda step: 0.02 * step, DEVICE, "warning"),
        (lambda step: max(step - 500, 0), HOST, "note"),
        (lambda step: 0.5 * step - 4 * (step % 10) / 10, DEVICE, "warning"),
    ],
    ids=["list of outputs", "total += loss", "begins late", "collector frees a part"],
)
def test_memory_that_rises_steadily_is_reported_once(
    mebibytes: Curve, tag: str, severity: str
) -> None:
    [alert] = found("memory_growth", memory(mebibytes, tag))
    assert alert.severity == severity
    assert alert.step >= 340
    assert alert.value >= alert.threshold
    assert any("loss.item()" in text for text in alert.advice)


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("input_bound", waiting(lambda step: 0.02)),  # prefetched
        ("input_bound", waiting(lambda step: 3.0 if step % 4 == 0 else 0.0)),  # bursts
        ("input_bound", waiting(lambda step: 0.0004, scale=0.002)),  # the loop takes as long
        ("input_bound", waiting(lambda step: 5.0 if 100 <= step < 120 else 0.01)),  # a checkpoint
        ("memory_growth", memory(lambda step: 400 * (1 - np.exp(-step / 60)))),  # warms up
        ("memory_growth", memory(lambda step: min(step, 250) * 2.0)),  # a cache that fills up
        ("memory_growth", memory(lambda step: 0.5 * step, tokens=lambda step: 512 + 2 * step)),
        ("memory_growth", memory(lambda step: 0.4 * (step % 200))),  # outputs of an epoch
        ("memory_growth", memory(lambda step: 0.0, DEVICE)),
        ("memory_growth", memory(lambda step: 0.02 * step)),  # too little to matter on a host
    ],
)
def test_what_is_brief_small_or_has_a_reason_is_no_fault(kind: str, run: Run) -> None:
    assert found(kind, run) == []


@pytest.mark.parametrize(
    ("kind", "run"),
    [
        ("input_bound", waiting(from_step(100, 0.01, 0.3))),
        ("memory_growth", memory(lambda step: 0.5 * step if step < 600 else 0.0)),
    ],
)
def test_what_is_usual_again_resolves(kind: str, run: Run) -> None:
    assert [alert.stage for alert in found(kind, run)] == ["started", "resolved"]


@pytest.mark.parametrize(("every", "steps"), [(1, 1000), (7, 2000), (64, 6000)])
def test_steps_without_a_record_change_no_finding(every: int, steps: int) -> None:
    times = [timed(step, (0.2, 0.03, 0.06, 0.02)) for step in range(0, steps, every)]
    run = [replace(r, usage={**r.usage, HOST: (500 + 0.5 * r.step) * MIB}) for r in times]
    alerts = alerts_of(run, [rule("input_bound"), rule("memory_growth")])
    assert sorted(alert.kind for alert in alerts) == ["input_bound", "memory_growth"]


def test_full_steps_count_only_where_all_steps_are_full() -> None:
    assert len(found("input_bound", [replace(r, full=True) for r in waiting(lambda _: 0.3)])) == 1
    mixed = waiting(lambda step: 0.3 if step % 2 == 0 else 0.01)
    assert found("input_bound", [replace(one, full=one.step % 2 == 0) for one in mixed]) == []


def test_unknown_times_are_judged_by_nothing() -> None:
    rules = [rule("input_bound"), rule("memory_growth")]
    unknown = [replace(one, usage={}) for one in waiting(lambda step: 0.3)]
    assert alerts_of(unknown, rules) == []
    assert not any(one.requests_full_step for one in rules)


def test_a_resumed_run_has_no_history_of_another_machine() -> None:
    before, after = rule("input_bound"), rule("input_bound")
    assert len(alerts_of(waiting(lambda step: 0.3), [before])) == 1
    after.load_state_dict(before.state_dict())
    later = [replace(one, step=one.step + 300) for one in waiting(lambda step: 0.01)]
    assert [alert.stage for alert in alerts_of(later, [after])] == ["resolved"]


@pytest.mark.parametrize(("part", "why"), [(0, "data"), (1, "computing"), (3, "computing")])
def test_the_slowest_rank_is_named_with_the_reason(part: int, why: str) -> None:
    usage = {
        f"time/{name}_s": (0.01, 0, 0.3 if n == part else 0.02, n) for n, name in enumerate(PARTS)
    }
    usage["time/backward_s"] = (0.1, part, 0.4, 0)
    run = (of_ranks(one, 4, usage=usage) for one in waiting(lambda step: 0.3))
    [alert] = found("input_bound", run)
    assert alert.cause is not None
    assert alert.cause.startswith(f"Rank {part} ")
    assert why in alert.cause


def train(log_dir: Path, kind: str, steps: int, before: Before) -> list[Alert]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, every_n_steps=50) as logger:
        fit(logger, steps, lambda _: model(torch.rand(4, 8)).sum(), optimizer, before=before)
    return [alert for alert in logger.alerts if alert.kind == kind]


def test_a_loader_that_sleeps_is_reported_in_training(tmp_path: Path) -> None:
    assert train(tmp_path / "fast", "input_bound", 70, lambda _: None) == []
    [alert] = train(tmp_path / "slow", "input_bound", 70, lambda _: time.sleep(0.02))
    assert alert.value > 0.4


@pytest.mark.slow
@pytest.mark.parametrize("keeps", [False, True])
def test_tensors_that_a_list_keeps_are_reported_in_training(tmp_path: Path, keeps: bool) -> None:
    kept: list[Any] = []

    def keep(step: int) -> None:
        kept[len(kept) * keeps :] = [torch.ones(2**17)]
        time.sleep(0.005)  # of a step, so that the memory is read at several

    alerts = train(tmp_path, "memory_growth", 600, keep)
    assert [alert.value >= 64 * MIB for alert in alerts] == [True] * keeps

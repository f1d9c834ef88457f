"""Time and memory: four faulty runs of each kind, and their healthy twins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from telemetry import Alert, HookLogger
from telemetry.alerts.detector import Detector
from telemetry.alerts.engine import Engine
from telemetry.alerts.resources import InputBound, MemoryGrowth, SlowSteps
from telemetry.records import Layout, RankFacts, Spread, StepRecord
from telemetry.tag_names import ALLOCATED_BYTES, HOST_OWN_BYTES, TIMES

LAYOUT = Layout(modules=(), parameters=())
MIB = 2**20
STEPS = 2600
Run = Iterator[StepRecord]
Curve = Callable[[int], float]


def record(
    step: int, times: tuple[float, ...] = (0.01, 0.03, 0.06, 0.02), **more: float
) -> StepRecord:
    """Return a light step with these times, and memory by tag."""
    tokens = more.pop("tokens", 512.0)
    return StepRecord(
        step=step, wall_time=float(step), layout=LAYOUT, full=step % 100 == 0, tokens=tokens,
        grad_norms=np.zeros(0), grad_present=np.zeros(0, bool), grad_finite=np.zeros(0, bool),
        usage={**dict(zip(TIMES, times, strict=True)), **more},
    )  # fmt: skip


def noise(step: int) -> float:
    """Return a factor as of a busy machine: usually near 1, sometimes far above."""
    draws = np.random.default_rng(step)
    return float(np.exp(0.3 * draws.normal()) * (5 if draws.random() < 0.05 else 1))


def found(detector: Detector, run: Run, *, every: int = 1) -> list[Alert]:
    return [alert for one in run if one.step % every == 0 for alert in detector(one)]


# --- input_bound ----------------------------------------------------------------------------------


def waiting(wait_s: Curve, scale: float = 1.0) -> Run:
    """Yield steps of 0.11 s beside the wait, each with noise."""
    for step in range(300):
        own = noise(2 * step) * scale
        wait = wait_s(step) * noise(2 * step + 1)
        yield record(step, (wait, 0.03 * own, 0.06 * own, 0.02 * own))


@pytest.mark.parametrize(
    "run",
    [
        waiting(lambda step: 0.2),  # a loader that decodes images itself
        waiting(lambda step: 0.16 if step >= 100 else 0.001),  # a cold file system
        waiting(lambda step: 0.02, scale=0.1),  # a small network, transforms in Python
        waiting(lambda step: 0.3 if step % 4 else 0.0),  # one worker in four keeps up
    ],
    ids=["decodes", "becomes slow", "small network", "few workers"],
)
def test_steps_that_wait_for_data_are_reported_once(run: Run) -> None:
    [alert] = found(InputBound(), run)
    assert (alert.kind, alert.severity, alert.stage) == ("input_bound", "note", "started")
    assert 0.4 < alert.value < 1
    assert any("num_workers" in text for text in alert.advice)


@pytest.mark.parametrize(
    "run",
    [
        waiting(lambda step: 0.02),  # prefetched
        waiting(lambda step: 3.0 if step % 4 == 0 else 0.0),  # bursts: most steps do not wait
        waiting(lambda step: 0.0004, scale=0.002),  # 0.3 ms, and the loop takes as long
        waiting(lambda step: 5.0 if 100 <= step < 120 else 0.01),  # a checkpoint is saved
    ],
    ids=["prefetched", "bursts", "very fast", "pause"],
)
def test_steps_that_rarely_wait_are_no_fault(run: Run) -> None:
    assert found(InputBound(), run) == []


def test_a_wait_that_ends_resolves() -> None:
    alerts = found(InputBound(), waiting(lambda step: 0.3 if step < 100 else 0.01))
    assert [alert.stage for alert in alerts] == ["started", "resolved"]


def test_full_steps_count_only_where_all_steps_are_full() -> None:
    run = [replace(one, full=True) for one in waiting(lambda step: 0.3)]
    assert len(found(InputBound(), iter(run))) == 1
    mixed = (replace(one, full=one.step % 2 == 0) for one in waiting(
        lambda step: 0.3 if step % 2 == 0 else 0.01))  # fmt: skip
    assert found(InputBound(), mixed) == []


# --- slow_steps -----------------------------------------------------------------------------------


def slowed(factor: Curve, step_s: float = 1.0, part: int = 2, tokens: Curve | None = None) -> Run:
    """Yield steps of which one part, and so the step, takes so many times as long."""
    for step in range(600):
        parts = [0.1, 0.2, 0.5, 0.2]
        parts[part] += factor(step) - 1
        times = tuple(step_s * noise(step) * value for value in parts)
        yield record(step, times, tokens=512.0 if tokens is None else tokens(step))


@pytest.mark.parametrize(
    ("run", "part"),
    [
        (slowed(lambda step: 3.0 if step >= 300 else 1.0, part=0), "waiting for data"),
        (slowed(lambda step: 1 + step / 100, part=1), "forward"),  # a list that is searched
        (
            slowed(lambda step: 1 + max(step - 200, 0) / 50, part=2),
            "backward",
        ),  # a graph that grows
        (slowed(lambda step: 4.0 if step >= 400 else 1.0, part=3), "optimizer"),
    ],
    ids=["disk", "list", "graph", "optimizer"],
)
def test_steps_that_became_slow_are_reported_with_their_part(run: Run, part: str) -> None:
    [alert] = found(SlowSteps(), run)
    assert (alert.kind, alert.severity) == ("slow_steps", "note")
    assert alert.value >= 2
    assert alert.cause is not None
    assert part in alert.cause


@pytest.mark.parametrize(
    "run",
    [
        slowed(lambda step: 1.0),
        slowed(lambda step: 3.0 if 300 <= step < 320 else 1.0),  # another job, for 20 steps
        slowed(lambda step: 4.0 if step >= 300 else 1.0, step_s=0.05),  # ten seconds of noise
        # Sequences four times as long.
        slowed(
            lambda step: 4.0 if step >= 300 else 1.0, tokens=lambda s: 2048 if s >= 300 else 512
        ),
    ],
    ids=["steady", "pause", "short steps", "longer sequences"],
)
def test_steps_that_are_slow_for_a_reason_or_briefly_are_no_fault(run: Run) -> None:
    assert found(SlowSteps(), run) == []


def test_a_slow_machine_is_the_cause_where_all_parts_became_slower() -> None:
    slower = zip((0.1, 0.2, 0.5, 0.2), (2.0, 2.2, 3.4, 2.8), strict=True)
    busy = tuple(s * by for s, by in slower)
    run = (
        record(
            step, tuple(noise(step) * s for s in (busy if step >= 300 else (0.1, 0.2, 0.5, 0.2)))
        )
        for step in range(450)
    )
    [alert] = found(SlowSteps(), run)
    assert alert.cause == "All parts that compute are slower"
    assert alert.advice == ("Check for other programs on the machine, and for its clock",)


def test_steps_that_are_fast_again_resolve() -> None:
    run = slowed(lambda step: 4.0 if 200 <= step < 400 else 1.0)
    assert [alert.stage for alert in found(SlowSteps(), run)] == ["started", "resolved"]


# --- memory_growth --------------------------------------------------------------------------------


def memory(mebibytes: Curve, tag: str = HOST_OWN_BYTES, tokens: Curve = lambda step: 512.0) -> Run:
    for step in range(STEPS):
        seen = tag == HOST_OWN_BYTES or step % 10 == 0
        draws = np.random.default_rng(step)
        batch = 0.5 * draws.random() if tag == HOST_OWN_BYTES else 3.0 * draws.random()
        value = {tag: (500 + mebibytes(step) + batch) * MIB} if seen else {}
        yield record(step, tokens=tokens(step), **value)


@pytest.mark.parametrize(
    ("run", "severity"),
    [
        (memory(lambda step: 0.3 * step), "note"),  # a list of outputs
        (memory(lambda step: 0.02 * step, ALLOCATED_BYTES), "warning"),  # total += loss
        (memory(lambda step: 1.0 * max(step - 500, 0)), "note"),  # begins late
        # Python's collector frees a part of it now and then.
        (memory(lambda step: 0.5 * step - 4 * (step % 10) / 10, ALLOCATED_BYTES), "warning"),
    ],
    ids=["outputs", "total", "late", "collector"],
)
def test_memory_that_rises_steadily_is_reported_once(run: Run, severity: str) -> None:
    [alert] = found(MemoryGrowth(), run)
    assert (alert.kind, alert.severity) == ("memory_growth", severity)
    assert alert.step >= 340
    assert alert.value >= alert.threshold
    assert any("loss.item()" in text for text in alert.advice)


@pytest.mark.parametrize(
    "run",
    [
        memory(lambda step: 400 * (1 - np.exp(-step / 60))),  # an allocator that warms up
        memory(lambda step: min(step, 250) * 2.0),  # a cache that fills up
        memory(lambda step: 0.5 * step, tokens=lambda step: 512 + 2 * step),  # longer inputs
        memory(lambda step: 0.4 * (step % 200)),  # the outputs of an epoch, for a metric
        memory(lambda step: 0.0, ALLOCATED_BYTES),
        memory(lambda step: 0.02 * step),  # too little to matter on a host
    ],
    ids=["warm-up", "cache", "longer inputs", "epochs", "steady", "little"],
)
def test_memory_that_rises_for_a_reason_is_no_fault(run: Run) -> None:
    assert found(MemoryGrowth(), run) == []


def test_memory_that_falls_resolves() -> None:
    run = memory(lambda step: 0.5 * step if step < 600 else 0.0)
    assert [alert.stage for alert in found(MemoryGrowth(), run)] == ["started", "resolved"]


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, 7, 64])
def test_steps_without_a_record_change_no_finding(every: int) -> None:
    longer = (record(s, **{HOST_OWN_BYTES: (500 + 0.5 * s) * MIB}) for s in range(6000))
    assert len(found(MemoryGrowth(), longer, every=every)) == 1
    waits = (record(step, (0.2, 0.03, 0.06, 0.02)) for step in range(6000))
    assert len(found(InputBound(), waits, every=every)) == 1


def test_unknown_times_are_judged_by_nothing() -> None:
    engine = Engine([InputBound(), SlowSteps(), MemoryGrowth()])
    for one in waiting(lambda step: 0.3):
        assert [*engine(replace(one, usage={}))] == []
    assert not engine.requests_full_step


def test_a_resumed_run_has_no_history_of_another_machine() -> None:
    before = InputBound()
    assert len(found(before, waiting(lambda step: 0.3))) == 1
    after = InputBound()
    after.load_state_dict(before.state_dict())
    later = (replace(one, step=one.step + 300) for one in waiting(lambda step: 0.01))
    assert [alert.stage for alert in found(after, later)] == ["resolved"]


@pytest.mark.parametrize(("part", "why"), [(0, "data"), (1, "computing"), (3, "computing")])
def test_the_slowest_rank_is_named_with_the_reason(part: int, why: str) -> None:
    def of_ranks(one: StepRecord) -> StepRecord:
        usage = {
            tag: Spread(low=0.01, low_rank=0, high=0.3 if n == part else 0.02, high_rank=n)
            for n, tag in enumerate(TIMES)
        }
        usage[TIMES[2]] = Spread(low=0.1, low_rank=part, high=0.4, high_rank=0)
        return replace(one, ranks=RankFacts(size=4, held=frozenset(range(4)), usage=usage))

    [alert] = found(InputBound(), map(of_ranks, waiting(lambda step: 0.3)))
    assert alert.cause is not None
    assert alert.cause.startswith(f"Rank {part} ")
    assert why in alert.cause


def train(
    log_dir: Path, detector: Detector, steps: int, prepare: Callable[[], object]
) -> list[Alert]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with HookLogger(model, log_dir, alerts={detector.kind: detector}, every_n_steps=50) as logger:
        for _ in range(steps):
            prepare()
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [alert for alert in logger.alerts if alert.kind == detector.kind]


def test_a_loader_that_sleeps_is_reported_in_training(tmp_path: Path) -> None:
    assert train(tmp_path / "fast", InputBound(), 70, lambda: None) == []
    [alert] = train(tmp_path / "slow", InputBound(), 70, lambda: time.sleep(0.02))
    assert alert.value > 0.4


@pytest.mark.slow
def test_tensors_that_a_list_keeps_are_reported_in_training(tmp_path: Path) -> None:
    kept: list[Tensor] = []

    def keep() -> None:
        kept.append(torch.ones(2**17))
        time.sleep(0.005)

    def drop() -> None:
        torch.ones(2**17)
        time.sleep(0.005)

    assert train(tmp_path / "healthy", MemoryGrowth(), 450, drop) == []
    [alert] = train(tmp_path / "leak", MemoryGrowth(), 600, keep)
    assert alert.value >= 64 * MIB

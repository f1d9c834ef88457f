"""Cost: no calls per module at light steps, and bounded memory."""

from __future__ import annotations

import gc
import itertools
import sys
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.capture import Capture, CapturedStep, Content, clock, observations
from telemetry.failures import Failures
from telemetry.pipeline import FullSteps
from telemetry.selection import Selection
from tests.helpers.twins import Recorder, assert_left_alone


def deep(modules: int) -> nn.Module:
    """Return a model of one layer with parameters and others without."""
    return nn.Sequential(nn.Linear(2, 2), *[nn.Identity() for _ in range(modules - 1)])


def train(model: nn.Module, steps: int, micro_batches: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(micro_batches):
            model(torch.ones(2, 2)).sum().backward()
        optimizer.step()


@contextmanager
def count_package_calls(counts: Counter[str]) -> Iterator[None]:
    """Count the calls of this package's functions on this thread."""

    def note(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call" and "/telemetry/" in frame.f_code.co_filename:
            counts[frame.f_code.co_qualname if sys.version_info >= (3, 11) else ""] += 1

    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def test_light_steps_make_no_calls_per_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of short steps, not each is measured; by this clock, all are.
    monkeypatch.setattr(clock, "perf_counter", itertools.count().__next__)
    totals = []
    for modules in (2, 200):
        model, counts = deep(modules), Counter[str]()
        with HookLogger(model, tmp_path / str(modules), every_n_steps=100, alerts=()):
            train(model, 1)
            with count_package_calls(counts):
                train(model, 1)
        totals.append(counts)
    assert totals[0] == totals[1]
    assert 0 < sum(totals[0].values()) < 200


def calls_to_attach(modules: int, log_dir: Path) -> int:
    """Count the function calls that create a logger of a model with ``100 * modules`` modules."""
    model = nn.Sequential(*[nn.Sequential(*[nn.ReLU() for _ in range(99)]) for _ in range(modules)])
    model.append(nn.Linear(1, 1))
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        logger = HookLogger(model, log_dir)
    finally:
        sys.setprofile(None)
    logger.close()
    return calls


@pytest.mark.slow
def test_calls_to_attach_grow_linearly_with_the_modules(tmp_path: Path) -> None:
    """Compare 10,000 modules with 1,000; calls do not depend on the machine."""
    calls_to_attach(1, tmp_path / "warm-up")
    small = calls_to_attach(10, tmp_path / "small")
    large = calls_to_attach(100, tmp_path / "large")
    assert large < 11 * small
    assert large < 250 * 10_000


# --- memory --------------------------------------------------------------------------------------


def test_observations_of_a_step_of_many_micro_batches_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the limit, calls are counted and not observed."""
    monkeypatch.setattr(observations, "MANY_OBSERVATIONS", 60)
    observed: list[int] = []
    record = CapturedStep.record

    def spy(self: CapturedStep, *args: Any) -> Any:
        observed.append(len(self.detail.observations.all))
        return record(self, *args)

    monkeypatch.setattr(CapturedStep, "record", spy)
    model, recorder = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
        train(model, 1, micro_batches=100)
    [step] = recorder.records
    assert observed == [60 + 2 * 2]  # a gradient and a weight of each of two parameters
    for tensors in (step.activations, step.activation_grads):
        assert {tensor.calls for tensor in tensors.values()} == {100}
    assert (
        step.activations["0"].sketch.count == 12 * 4
    )  # 12 passes: an input, two outputs, two gradients
    assert step.grads["0.weight"].calls == 1


def test_every_tensor_is_measured_even_in_a_step_at_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observations, "MANY_OBSERVATIONS", 10)
    model, recorder = deep(20), Recorder()
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=1):
        train(model, 1, micro_batches=10)
    [step] = recorder.records
    assert {t.sketch.count for t in step.activations.values()} == {4 * observations.FEW_CALLS}
    assert {t.calls for t in step.activations.values()} == {10}


def test_training_is_left_alone_at_the_limit_of_observations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observations, "MANY_OBSERVATIONS", 7)

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        train(model, 2, micro_batches=9)
        yield model[0].weight

    assert_left_alone(lambda: deep(3), loop, tmp_path)


@pytest.mark.slow
def test_memory_does_not_grow_without_steps(tmp_path: Path) -> None:
    """The memory of the step in progress is bounded over many passes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

    def passes(count: int) -> int:
        for _ in range(count):
            model(torch.ones(2, 2)).sum().backward()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    with HookLogger(model, tmp_path, every_n_steps=1):
        tracemalloc.start()
        try:
            bound = observations.MANY_OBSERVATIONS
            full = passes(bound // 4 + 10)
            assert passes(300) < full + 50_000
        finally:
            tracemalloc.stop()


@pytest.mark.slow
def test_memory_held_between_steps_does_not_grow() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    capture = Capture(
        model,
        selection=Selection.parse(),
        is_full=FullSteps(2),
        content=Content(),
        deliver=lambda captured: captured.record({}),
        safe_point=lambda: None,
        primary=None,
        failures=Failures(),
    )

    def after(steps: int) -> int:
        for _ in range(steps):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    capture.attach()
    tracemalloc.start()
    try:
        before = after(20)
        assert after(60) < before + 20_000
    finally:
        tracemalloc.stop()
        capture.detach()

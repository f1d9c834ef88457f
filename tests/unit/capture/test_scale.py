"""Cost in calls and memory, bounded over modules, passes and steps, and what records tell of it."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import HookLogger
from tests.helpers.hand import TwoParts
from tests.helpers.twins import Recorder, assert_left_alone, descend


@contextmanager
def counting_calls(only_in: str = "") -> Iterator[Callable[[], int]]:
    """Count the function calls on this thread, of Python code in paths with ``only_in``."""
    calls = 0

    def count(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal calls
        if only_in:
            calls += event == "call" and only_in in frame.f_code.co_filename
        else:
            calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield lambda: calls
    finally:
        sys.setprofile(None)


def test_light_steps_make_no_calls_per_module(tmp_path: Path) -> None:
    extremes = []
    for modules in (2, 200):
        model = nn.Sequential(nn.Linear(2, 2), *[nn.Identity() for _ in range(modules - 1)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        counts = []
        with HookLogger(model, tmp_path / str(modules), every_n_steps=100, alerts=()):
            for _ in range(16):  # not each light step is timed
                optimizer.zero_grad()
                with counting_calls(only_in="/telemetry/") as calls:
                    model(torch.ones(2, 2)).sum().backward()
                    optimizer.step()
                    counts.append(calls())
        extremes.append((min(counts[2:]), max(counts[2:])))
    (fewest, most), (fewest_of_many, most_of_many) = extremes
    assert fewest > 0
    assert abs(fewest_of_many - fewest) < 10  # of 198 modules more
    assert most_of_many < max(most + 50, 200)


def calls_to_attach(groups: int, log_dir: Path, modules: Any) -> int:
    """Count the calls that create a logger of a model with ``100 * groups`` modules."""
    model = nn.Sequential(*[nn.Sequential(*[nn.ReLU() for _ in range(99)]) for _ in range(groups)])
    model.append(nn.Linear(1, 1))
    with counting_calls() as calls:
        logger = HookLogger(model, log_dir, modules=modules)
        count = calls()
    logger.close()
    return count


@pytest.mark.slow
@pytest.mark.parametrize("modules", [None, ["*.1", "!*.0"]])
def test_calls_to_attach_grow_linearly_with_the_modules(tmp_path: Path, modules: Any) -> None:
    calls_to_attach(1, tmp_path / "warm-up", modules)
    small = calls_to_attach(10, tmp_path / "small", modules)
    large = calls_to_attach(100, tmp_path / "large", modules)
    assert large < 11 * small
    assert large < 250 * 10_000


PASSES, LATE = 5000, 800  # all passes, and those that come after the limit


@pytest.mark.slow
def test_a_step_of_very_many_micro_batches_is_bounded(tmp_path: Path) -> None:
    """Above 8192 tensors in one step, further calls are counted, and four of each measured."""
    blocks: list[int] = []

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        assert isinstance(model, TwoParts)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(PASSES):
            model.first(torch.rand(2, 4)).sum().backward()
            if logger is not None and number in (PASSES - LATE, PASSES - 1):
                gc.collect()
                blocks.append(sys.getallocatedblocks())
        for _ in range(10):
            model.second(torch.rand(2, 6)).sum().backward()
        optimizer.step()
        yield model.first.weight

    outcome = assert_left_alone(TwoParts, loop, tmp_path)
    [step] = outcome.records
    assert blocks[1] - blocks[0] < LATE  # less than one for each pass
    assert step.activations["first"].calls == PASSES
    measured = step.activations["first"].sketch.count / 12
    assert measured == 8192 / 2  # an output and its gradient of each pass
    for tensors in (step.activations, step.activation_grads):
        assert (tensors["second"].calls, tensors["second"].sketch.count) == (10, 4 * 4)
    assert step.grads["first.weight"].calls == 1


@pytest.mark.slow
def test_memory_held_between_steps_does_not_grow(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def blocks_after(steps: int) -> int:
        descend(model, torch.ones(2, 8), optimizer, steps=steps)
        logger.flush()
        gc.collect()
        return sys.getallocatedblocks()

    with HookLogger(model, tmp_path, alerts=(), every_n_steps=2) as logger:
        before = blocks_after(200)
        # A record alone has hundreds of them.
        assert blocks_after(200) - before < 10 * 200


@pytest.mark.parametrize("called", [True, False])
def test_waits_of_a_loader_and_memory_that_the_loop_keeps_are_found(
    tmp_path: Path, called: bool
) -> None:
    """``mechanisms/test_loop_clock.py`` has exact times."""
    model, recorder, kept = nn.Linear(4, 4), Recorder(), list[Tensor]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if sys.platform == "linux":  # memory that earlier tests have freed is not taken again unseen
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    with HookLogger(model, tmp_path, alerts=[recorder], every_n_steps=10):
        for _ in range(30):
            time.sleep(0.03)
            x = torch.rand(8, 4)
            (model(x) if called else F.linear(x, model.weight)).sum().backward()
            kept.append(torch.ones(2**20))
            optimizer.step()
    light = [record.usage for record in recorder.records if not record.full]
    waits = [usage["time/data_wait_s"] for usage in light if "time/data_wait_s" in usage]
    assert len(waits) == (27 if called else 0)
    assert not called or median(waits) > 0.029
    memory = [record.usage["memory/host_own_bytes"] for record in recorder.records]
    # The system may take pages back where memory is short.
    assert 2 * 30 * 2**20 < memory[-1] - memory[0] < 5 * 30 * 2**20
    table = telemetry.read(tmp_path).scalars
    assert len(table[table.tag == "memory/host_rss_bytes"]) == 3

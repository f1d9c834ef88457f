"""Times and memory of steps in real time; tests/mechanisms/test_loop_clock.py has exact ones."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import telemetry
from telemetry import HookLogger
from tests.helpers.twins import Outcome, run

WAIT = "time/data_wait_s"


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 4))


def loading(wait_s: float, kept: list[Tensor], log_dir: Path) -> Outcome:
    """Train with a loader that sleeps; the loop keeps a tensor of 4 MiB at each step."""

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(30):
            time.sleep(wait_s)
            model(torch.rand(8, 4)).sum().backward()
            kept.append(torch.ones(2**20))
            optimizer.step()
            yield None

    return run(net, loop, log_dir, every_n_steps=10)


def test_waits_of_a_loader_and_memory_that_the_loop_keeps_are_found(tmp_path: Path) -> None:
    kept: list[Tensor] = []
    records = loading(0.03, kept, tmp_path).records
    light = [record.usage for record in records[1:] if not record.full]
    assert len(light) == 27
    assert all(usage[WAIT] >= 0.03 for usage in light)
    memory = [record.usage["memory/host_own_bytes"] for record in records]
    # The system may take pages back where memory is short.
    assert 2 * 30 * 2**20 < memory[-1] - memory[0] < 5 * 30 * 2**20
    table = telemetry.read(tmp_path).scalars
    assert len(table[table.tag == "memory/host_rss_bytes"]) == 3


def test_a_model_that_is_never_called_has_no_times(tmp_path: Path) -> None:
    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[object]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(20):
            F.linear(torch.rand(8, 4), model.weight).sum().backward()  # type: ignore[arg-type]
            optimizer.step()
            yield None

    records = run(lambda: nn.Linear(4, 4), loop, tmp_path).records
    assert all(WAIT not in record.usage for record in records)
    assert records[3].usage["memory/host_rss_bytes"] > 0

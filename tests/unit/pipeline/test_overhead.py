"""``max_overhead`` postpones full steps and norms; rules and losses lose nothing without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn, optim, rand
from torch.nn import functional as F

import telemetry
from telemetry import HookLogger
from tests.helpers.figures import figures
from tests.helpers.twins import assert_left_alone, run

STEPS = 300


def deep() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))


def train(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
    optimizer = optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(rand(8, 4)), rand(8, 4))
        loss.backward()
        if logger is not None:
            logger.log(loss=loss)
        optimizer.step()
        yield loss


def curves(log_dir: Path) -> dict[str, list[tuple[int, float]]]:
    table = telemetry.read(log_dir).scalars
    found: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in zip(table.tag, table.step, table.value, strict=True):
        found.setdefault(tag, []).append((int(step), value))
    return found


def test_a_limit_that_nothing_fits_leaves_the_first_steps_and_every_hundredth_norm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = {"every_n_steps": 10, "max_overhead": 1e-9}
    outcome = assert_left_alone(deep, train, tmp_path, **limits)
    assert [record.step for record in outcome.full] == [0]
    steps = [record.step for record in outcome.records]
    assert steps[:33] == [*range(33)]
    assert steps[-2:] == [100, 200]
    found = curves(tmp_path)
    assert [step for step, _ in found["loss"]] == [*range(STEPS)]
    assert found["telemetry/every_n_steps"] == [(0, 10.0)]
    assert found["telemetry/norms_every_n_steps"] == [(0, 1.0)]
    messages = [message for message in caplog.messages if "max_overhead=1e-09" in message]
    # Each limit is reported once, with its interval and the curve that shows it.
    assert [10 in figures(messages[0]), 100 in figures(messages[1])] == [True, True]
    assert [message.rsplit(" ", 1)[1] for message in messages] == [
        "telemetry/every_n_steps",
        "telemetry/norms_every_n_steps",
    ]


@pytest.mark.parametrize("limit", [{}, {"max_overhead": math.inf}])
def test_without_a_limit_no_full_step_is_postponed_and_no_overhead_is_written(
    tmp_path: Path, limit: dict[str, Any]
) -> None:
    outcome = run(deep, train, tmp_path, every_n_steps=10, **limit)
    assert [record.step for record in outcome.full] == [*range(0, STEPS, 10)]
    assert [record.step for record in outcome.records] == [*range(STEPS)]
    assert not [tag for tag in curves(tmp_path) if "overhead" in tag or "every_n" in tag]


@pytest.mark.parametrize("wrong", [0, -0.1, 1.5, math.nan])
def test_an_implausible_share_is_refused(tmp_path: Path, wrong: float) -> None:
    with pytest.raises(ValueError, match=r"HookLogger\(max_overhead=.*must be above 0"):
        HookLogger(deep(), tmp_path, max_overhead=wrong)


@pytest.mark.parametrize("wrong", ["1%", True])
def test_a_share_that_is_not_a_number_is_refused(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"HookLogger\(max_overhead=.*must be a number"):
        HookLogger(deep(), tmp_path, max_overhead=wrong)

"""Gradient norms before and after clipping, and the share of clipped steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import telemetry
from telemetry import HookLogger, StepRecord
from telemetry.testing import capture_run
from tests.helpers.twins import Outcome, assert_left_alone, mlp

Clip = Callable[[nn.Module], object]


def total_norm(model: nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()


def train(log_dir: Path, clip: Clip, *factors: float) -> tuple[Outcome, list[tuple[float, float]]]:
    """Multiply losses by the factors; return the norms before and after clipping, too."""
    seen: list[tuple[float, float]] = []

    def loop(model: nn.Module, logger: HookLogger | None) -> Iterator[Tensor]:
        seen.clear()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for factor in factors:
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(6, 4)).square().mean() * factor
                loss.backward()
            before = total_norm(model)
            clip(model)
            seen.append((before, total_norm(model)))
            optimizer.step()
            yield loss

    return assert_left_alone(mlp, loop, log_dir), seen


def by_norm(model: nn.Module) -> None:
    clip_grad_norm_(model.parameters(), 1.0)


def by_value(model: nn.Module) -> None:
    clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize("clip", [by_norm, by_value])
def test_the_norms_before_and_after_clipping_are_recorded(tmp_path: Path, clip: Clip) -> None:
    outcome, seen = train(tmp_path, clip, 100.0, 100.0, 100.0)
    for record, (before, after) in zip(outcome.full, seen, strict=True):
        assert before > after
        assert record.total_grad_norm_before_clipping == pytest.approx(before, rel=1e-5)
        assert record.total_grad_norm == pytest.approx(after, rel=1e-5)
        assert record.clipped_fraction == 1


def test_the_fraction_counts_the_steps_at_which_clipping_engaged(tmp_path: Path) -> None:
    _, seen = train(tmp_path, by_norm, 100.0, 1e-3, 1e-3, 100.0)
    assert [after < 0.9 * before for before, after in seen] == [True, False, False, True]
    table = telemetry.read(tmp_path).scalars
    curves = {tag: group.value.tolist() for tag, group in table.groupby("tag")}
    assert curves["grad_norm/clipped_fraction"] == pytest.approx([1, 1 / 2, 1 / 3, 2 / 4])
    norms = zip(curves["grad_norm/total_before_clipping"], curves["grad_norm/total"], strict=True)
    assert [*norms] == [pytest.approx(pair, rel=1e-5) for pair in seen]


def assert_unclipped(records: list[StepRecord]) -> None:
    for record in records:
        assert record.total_grad_norm_before_clipping == pytest.approx(record.total_grad_norm)
        assert record.clipped_fraction == 0


def test_without_clipping_both_norms_are_the_same(tmp_path: Path) -> None:
    outcome, _ = train(tmp_path, lambda model: None, 1.0, 1.0, 1.0)
    assert_unclipped(outcome.full)


def test_gradients_kept_from_an_earlier_step_do_not_count_as_clipped() -> None:
    """A layer that runs at every other step keeps its gradient."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture_run(model, rules=()) as run:
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad()
            x = torch.randn(6, 4)
            y = model(x) if step % 2 == 0 else model[2](x[:, :1].expand(6, 6))
            y.square().mean().backward()
            optimizer.step()
    assert all(record.grad_present.all() for record in run.records)
    assert_unclipped(run.records)

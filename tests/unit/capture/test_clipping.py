"""Gradient norms before and after clipping, and the share of clipped steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from tests.helpers.plain_events import EventAccumulator
from tests.helpers.twins import assert_left_alone

Clip = Callable[[nn.Module], object]


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def loop_with(
    clip: Clip, seen: list[tuple[float, float]], factors: tuple[float, ...] = (1.0,) * 3
) -> Callable[..., Iterator[Tensor]]:
    """Return a loop that multiplies losses by ``factors`` and appends the norms to ``seen``."""

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

    return loop


def total_norm(model: nn.Module) -> float:
    return torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm().item()


def by_norm(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def by_value(model: nn.Module) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)


@pytest.mark.parametrize("clip", [by_norm, by_value])
def test_the_norms_before_and_after_clipping_are_recorded(tmp_path: Path, clip: Clip) -> None:
    seen: list[tuple[float, float]] = []
    outcome = assert_left_alone(mlp, loop_with(clip, seen, (100.0,) * 3), tmp_path)
    for record, (before, after) in zip(outcome.full, seen, strict=True):
        assert before > after
        assert record.total_grad_norm_before_clipping == pytest.approx(before, rel=1e-5)
        assert record.total_grad_norm == pytest.approx(after, rel=1e-5)
        assert record.clipped_fraction == 1


def test_the_fraction_counts_the_steps_at_which_clipping_engaged(tmp_path: Path) -> None:
    loop = loop_with(by_norm, [], (100.0, 1e-3, 1e-3, 100.0))
    assert_left_alone(mlp, loop, tmp_path)
    accumulator = EventAccumulator(str(tmp_path)).Reload()
    fractions = [event.value for event in accumulator.Scalars("grad_norm/clipped_fraction")]
    assert fractions == pytest.approx([1, 1 / 2, 1 / 3, 2 / 4])
    before = accumulator.Scalars("grad_norm/total_before_clipping")
    after = accumulator.Scalars("grad_norm/total")
    engaged = [a.value < 0.9 * b.value for a, b in zip(after, before, strict=True)]
    assert engaged == [True, False, False, True]


def test_without_clipping_both_norms_are_the_same(tmp_path: Path) -> None:
    outcome = assert_left_alone(mlp, loop_with(lambda model: None, []), tmp_path)
    for record in outcome.full:
        assert record.total_grad_norm_before_clipping == pytest.approx(record.total_grad_norm)
        assert record.clipped_fraction == 0


def test_parameters_that_no_optimizer_steps_do_not_count(tmp_path: Path) -> None:
    """The optimizer neither clips nor uses their gradients."""

    def loop(model: nn.Sequential, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward()
            optimizer.step()
            yield loss

    outcome = assert_left_alone(mlp, loop, tmp_path)
    for record in outcome.full:
        assert record.total_grad_norm_before_clipping == pytest.approx(record.total_grad_norm)
        assert record.clipped_fraction == 0


def test_gradients_kept_from_an_earlier_step_do_not_count_as_clipped(tmp_path: Path) -> None:
    """A layer that runs at every other step keeps its gradient."""

    def loop(model: nn.Sequential, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(4):
            if step % 2 == 0:
                optimizer.zero_grad()
            x = torch.randn(6, 4)
            y = model(x) if step % 2 == 0 else model[2](x[:, :1].expand(6, 6))
            y.square().mean().backward()
            optimizer.step()
            yield y

    outcome = assert_left_alone(mlp, loop, tmp_path)
    for record in outcome.full:
        assert record.grad_present.all()
        assert record.total_grad_norm_before_clipping == pytest.approx(record.total_grad_norm)

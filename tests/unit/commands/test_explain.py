"""Faults explained as text."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from telemetry import Alert, HookLogger, StepRecord
from tests.helpers.known_runs import alert_at
from tests.helpers.shell import lines


class Blocks(nn.Module):
    """Blocks side by side that return their input, of which three of four units of one are dead."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.block = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))
        for block in self.block:
            nn.init.eye_(block.weight)
        nn.init.zeros_(self.block[0].weight[1:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x).mean() for block in self.block])


def fly(
    log_dir: Path, *, modules: int = 4, culprit: int = 2, moved: tuple[int, ...] = (),
    before_end: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """Train a model whose blocks from ``culprit`` on return NaN from step 30 on.

    Gradient norms are halved at each step; if blocks ``moved`` at step 27, the others are steady.
    """
    torch.manual_seed(123)
    model = Blocks(modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    alert = alert_at(
        30, f"block.{culprit}", kind="nonfinite", summary="7 of 8 elements are NaN",
        advice=("Check the batch",),
    )  # fmt: skip

    def rule(record: StepRecord) -> list[Alert]:
        return [alert] if record.step == 30 else []

    logger = HookLogger(model, log_dir, every_n_steps=10, alerts=[rule], measure="!images")
    with logger:
        for step in range(35):
            factors = torch.full((modules,), 2.0 * 2.0**-step)
            if moved:
                factors[:] = 1 + 0.01 * (step % 3)
                factors[list(moved)] *= 50 if step >= 27 else 1
            if step >= 30:
                factors[0 if moved else culprit :] = torch.nan
                for block in model.block[culprit:]:
                    nn.init.constant_(block.weight, torch.nan)
            logger.log(loss=1.0 + step)
            optimizer.zero_grad()
            model(torch.full((2, 4), 0.5)).backward(factors)
            optimizer.step()
        logger.flush()
        before_end()


def test_the_text_has_the_fault_its_module_step_and_advice(tmp_path: Path) -> None:
    fly(tmp_path)
    shown = lines("explain", tmp_path)
    for line in (
        "Something went wrong at step 30; first bad module: block.2",
        "error: nonfinite in block.2 at step 30",
        "  7 of 8 elements are NaN.",
        "  Check the batch.",
        "Batch 30 of a loop with one batch per step; torch was seeded with 123; explain --json "
        "has the random state at step 30",
        "Steps 0 to 34",
    ):
        assert line in shown
    assert shown[-1] == "telemetry help nonfinite explains it"
    assert "telemetry help" not in "".join(lines("explain", tmp_path, "--json"))
    [loss] = [line for line in shown if line.startswith("  loss ")]
    assert loss.endswith("  from 1 to 35")
    assert "▁" in loss
    assert "█" in loss
    norm, *_ = [line for line in shown if line.startswith("  gradient norm ")]
    assert norm.partition("  gradient norm ")[2].split()[0].endswith("!!!!!")


def test_the_depth_profile_marks_the_first_bad_module(tmp_path: Path) -> None:
    fly(tmp_path)
    shown = lines("explain", tmp_path)
    start = shown.index(
        "By depth, before (step 0) → at (step 30) → after (step 34); – was not measured; "
        "» is the first bad module"
    )
    header, given, *rows = shown[start + 1 : start + 7]
    assert given.startswith("  model input")
    assert header.split() == ["module", "output", "rms", "gradient", "norm", "update"]
    assert [row[:9] for row in rows] == ["  block.0", "  block.1", "» block.2", "  block.3"]
    assert "0.5 →     0.5 →       –        1 → 9.3e-10 → 5.8e-11" in rows[1]
    assert "0.5 →     nan →       –        1 →     nan →     nan" in rows[2]
    assert "  75% of units dead: block.0" in shown
    assert "  48 values not finite: block.2, block.3" in shown  # of outputs, weights, gradients


@pytest.mark.parametrize("modules", [100, 600])
def test_modules_around_the_first_bad_one_and_earliest_onsets_are_shown(
    tmp_path: Path, modules: int
) -> None:
    last = f"block.{modules - 7}"
    fly(tmp_path, modules=modules, culprit=60, moved=(3, modules - 7))
    shown = lines("explain", tmp_path)
    starts = [line.replace("»", " ").split()[0] for line in shown if line.strip("» ")]
    rows = [start for start in starts if start.startswith("block.")]
    assert {"block.3", "block.50", "block.60", last} <= set(rows)
    assert "block.10" not in rows
    assert len(rows) == 30
    assert f"  and {modules + 1 - 30} more modules" in shown
    assert f"  gradient norm unusual from step 27 on: block.3, {last}" in shown
    assert any(line.startswith("» block.60") for line in shown)
    assert starts.count("…") == 2


def test_a_fault_of_a_run_that_goes_on_is_not_complete(tmp_path: Path) -> None:
    seen: list[str] = []
    fly(tmp_path, before_end=lambda: seen.extend(lines("explain", tmp_path)))
    assert "(not complete: the run is still going on or was killed)" in "".join(seen)
    assert "(not complete" not in "".join(lines("explain", tmp_path))


def test_an_exception_is_shown_without_a_depth_profile(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(IndexError), HookLogger(model, tmp_path):
        raise IndexError("list index out of range")
    text = "\n".join(lines("explain", tmp_path))
    assert "The training ended in IndexError: list index out of range" in text
    assert "By depth" not in text

"""Small model, stopping alert and readers shared by the tests of all frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from telemetry import Alert, StepRecord
from telemetry.tag_names import plain
from tests.helpers.known_runs import alert_at
from tests.helpers.loops import written
from tests.helpers.paths import ROOT


def mlp() -> nn.Sequential:
    """The same one at each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def batches(count: int = 6) -> DataLoader[tuple[torch.Tensor, ...]]:
    """The same ones at each call, of 4 rows."""
    rows = torch.randn(4 * count, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(rows, rows[:, :2]), batch_size=4)


def curve(log_dir: Path, tag: str) -> dict[int, float]:
    """The points of a tag in the event files at and below a directory, by step; 0 if no scalar."""
    return {
        step: value.simple_value
        for folder in {path.parent for path in log_dir.rglob("*tfevents*")}
        for _, step, value in written(folder)
        if plain(value.tag) == tag
    }


def same_weights(bare: nn.Module, watched: nn.Module) -> bool:
    """Whether all parameters are equal, bit for bit."""
    pairs = zip(bare.parameters(), watched.parameters(), strict=True)
    return all(torch.equal(expected, got) for expected, got in pairs)


def assert_complete(records: list[StepRecord], *, steps: int, calls: int = 1) -> None:
    """Check the number of steps, and that each has all gradients, updates and layers."""
    assert [record.step for record in records] == list(range(steps))
    for record in records:
        assert record.grad_present.all()
        assert {tensor.calls for tensor in record.activations.values()} == {calls}
        assert {tensor.calls for tensor in record.activation_grads.values()} == {calls}
        assert all(ratio > 0 for ratio in record.update_ratios.values())


def assert_clipped(records: list[StepRecord]) -> None:
    """Check that a trainer has clipped the gradients of all steps to a norm of 0.01."""
    for record in records:
        assert record.total_grad_norm == pytest.approx(0.01, rel=1e-3)
        assert record.total_grad_norm_before_clipping > 0.02


class AlertFrom:
    """A rule with one alert, at this step."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, record: StepRecord) -> Iterator[Alert]:
        if record.step == self._step:
            yield alert_at(record.step, None, kind="made_up", summary="stop here")


def run_example(heading: str, **names: Any) -> dict[str, Any]:
    """Run the code under a heading of ``docs/howto/trainers.md``, and return its names."""
    page = (ROOT / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    [code] = re.findall(rf"^## {heading}\n+```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, f"docs/howto/trainers.md, {heading}", "exec"), names)
    return names

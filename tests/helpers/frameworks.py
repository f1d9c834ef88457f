"""Small model, stopping alert and readers shared by the tests of all frameworks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from telemetry import Alert, StepRecord
from telemetry.events.reading import EventReader, list_event_files
from telemetry.tag_names import plain
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
    paths = [
        path
        for folder in {path.parent for path in log_dir.rglob("*tfevents*")}
        for path in list_event_files(folder)
    ]
    return {
        event.step: value.simple_value
        for path in paths
        for event in EventReader(path)
        for value in event.summary.value
        if plain(value.tag) == tag
    }


def same_weights(bare: nn.Module, watched: nn.Module) -> bool:
    """Whether all parameters are equal, bit for bit."""
    pairs = zip(bare.parameters(), watched.parameters(), strict=True)
    return all(torch.equal(expected, got) for expected, got in pairs)


class AlertFrom:
    """A rule with one alert, at the first step from ``step`` on."""

    def __init__(self, step: int) -> None:
        self._step = step

    def __call__(self, record: StepRecord) -> Iterable[Alert]:
        if record.step != self._step:
            return ()
        return [
            Alert(
                kind="made_up", severity="error", step=record.step, module_name=None, value=1.0,
                threshold=0.0, summary="stop here",
            )
        ]  # fmt: skip


def run_example(heading: str, **names: Any) -> dict[str, Any]:
    """Run the code under a heading of ``docs/howto/trainers.md``, and return its names."""
    page = (ROOT / "docs" / "howto" / "trainers.md").read_text(encoding="utf-8")
    [code] = re.findall(rf"^## {heading}\n+```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    exec(compile(code, f"docs/howto/trainers.md, {heading}", "exec"), names)
    return names

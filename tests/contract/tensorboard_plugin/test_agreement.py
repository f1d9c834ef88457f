"""All views of one layer, step and statistic show the same number."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import train_mnist
from telemetry import HookLogger, StepRecord
from telemetry.layers import PAGE_STATISTICS, STATISTICS, table
from tests.helpers.applied import Applied
from tests.helpers.client import OpenClient
from tests.helpers.loops import load
from tests.helpers.shell import call, records
from tests.helpers.twins import Recorder

STEPS = 3


def transformer() -> nn.Module:
    """Attention returns two tensors, of which one is used."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.embed(x)
        x = m.norm(x + m.attention(x, x, x)[0])
        return m.head((x + m.mlp(x)).mean(1))

    return Applied(
        forward, embed=nn.Linear(4, 8), attention=nn.MultiheadAttention(8, 2, batch_first=True),
        norm=nn.LayerNorm(8), mlp=nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)),
        head=nn.Linear(8, 10),
    )  # fmt: skip


def train(model: nn.Module, batch: Callable[[], Tensor], log_dir: Path) -> list[StepRecord]:
    """A short run that ends in an error, which is explained."""
    torch.manual_seed(0)
    recorder = Recorder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logger = HookLogger(model, log_dir, every_n_steps=1, alerts=[recorder])
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(batch()), torch.randint(10, (6,))).backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match="planted"), logger:
        raise RuntimeError("planted")
    return recorder.records


MODELS: list[tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = [
    (lambda: train_mnist.build_model("none"), lambda: torch.randn(6, 1, 28, 28)),
    (transformer, lambda: torch.randn(6, 5, 4)),
]


@pytest.mark.parametrize(("make", "batch"), MODELS, ids=["mnist", "transformer"])
def test_curves_page_summary_explanation_and_rules_agree(
    make: Callable[[], nn.Module],
    batch: Callable[[], Tensor],
    tmp_path: Path,
    open_client: OpenClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    seen = train(make(), batch, tmp_path)
    modules, tables = seen[-1].layout.modules, [table(record) for record in seen]
    client = open_client(tmp_path)
    curves = load(tmp_path)
    at = records("explain", tmp_path)[0]["profiles"][-1]
    assert at["step"] == STEPS - 1
    statistics = [statistic for statistic in STATISTICS if not statistic.measured_in]
    compared = dict.fromkeys((s.name for s in statistics), 0)
    for statistic in statistics:
        name = statistic.name
        expected = np.array([[t.value(row, name) for t in tables] for row in range(len(modules))])
        if statistic in PAGE_STATISTICS:
            values = client.arrays("matrix", run=".", statistic=name)[1]["values"].T
            values = values[-len(modules) :]  # below the input
            assert_same(np.where(values == -1, None, values), expected)
            printed = call("summary", tmp_path, "--statistic", name).stdout
            found = at[name][-len(modules) :]
            assert_same(np.array(found, dtype=object), expected[:, -1], rtol=1e-5)
        for row, module in enumerate(modules):
            if expected[row, -1] is None:
                continue
            compared[name] += 1
            tag = f"{name}/{row:04d}.{module.name}"
            if statistic.as_curve and not (statistic.zero_is_silent and not any(expected[row])):
                assert_same(np.array([p.value for p in curves.Scalars(tag)]), expected[row])
            if statistic in PAGE_STATISTICS:
                row_of = rf"^ *{re.escape(module.name)} +\w+ +(?:trains +)?(\S+)"
                [last] = re.findall(row_of, printed, re.M)
                assert float(last) == pytest.approx(expected[row, -1], rel=5e-3)
    assert {name for name, count in compared.items() if not count} <= {"saturation"}


def assert_same(got: np.ndarray, expected: np.ndarray, rtol: float = 2e-6) -> None:
    """Check that the same values are known and equal to float32 precision."""
    assert (got == None).tolist() == (expected == None).tolist()  # noqa: E711 - element by element
    known = expected != None  # noqa: E711
    np.testing.assert_allclose(
        got[known].astype(np.float64), expected[known].astype(np.float64), rtol=rtol, atol=1e-30
    )

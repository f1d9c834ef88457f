"""The curves of the whole run: learning rates, times of steps, spreads over the depth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.board import Board, open_slow
from tests.helpers.twins import Recorder, descend, loss_of

Points = list[tuple[int, float]]
INPUTS = torch.ones(4, 2)


def train(
    log_dir: Path,
    rate_of: Callable[[int], float],
    *,
    steps: Iterable[int],
    lr: Any = 0.1,
    **options: Any,
) -> None:
    """Train a small model; the rate of its first group at each step is ``rate_of`` it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    options = {"every_n_steps": 100, "alerts": (), "measure": "!images", **options}
    with HookLogger(model, log_dir, **options):
        for step in steps:
            group = optimizer.param_groups[0]
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate_of(step))
            else:
                group["lr"] = rate_of(step)
            descend(model, INPUTS, optimizer)


def curve(log_dir: Path, group: int = 0) -> Points:
    """The points, with each rate as before the file has rounded it to float32."""
    tags = Board(open_slow(log_dir)).scalars()["."]
    return [(step, round(value, 7)) for step, value in tags[f"learning_rate/{group}"]]


def jump(step: int) -> float:
    return 0.1 if step < 200 else 0.01


def cosine(step: int) -> float:
    return round(0.05 * (1 + math.cos(math.pi * step / 60)), 7)


@pytest.mark.parametrize(
    ("rate_of", "steps", "expected"),
    [
        (lambda step: 0.1, 201, [(0, 0.1), (100, 0.1), (200, 0.1)]),
        (
            lambda step: 0.1 if step < 150 else 0.2,
            220,
            [(0, 0.1), (100, 0.1), (149, 0.1), (150, 0.2), (200, 0.2)],
        ),
        (
            lambda step: 5.0 if 50 <= step < 53 else 0.1,
            101,
            [(0, 0.1), (49, 0.1), (50, 5.0), (52, 5.0), (53, 0.1), (100, 0.1)],
        ),
        (jump, 301, [(0, 0.1), (100, 0.1), (199, 0.1), (200, 0.01), (300, 0.01)]),
        (cosine, 60, [(step, cosine(step)) for step in range(60)]),
    ],
    ids=["constant", "jump between full steps", "spike of three steps", "jump at a full step",
         "change at every step"],
)  # fmt: skip
@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_a_rate_has_a_point_at_full_steps_and_wherever_it_changes(
    tmp_path: Path, rate_of: Callable[[int], float], steps: int, expected: Points, lr: Any
) -> None:
    train(tmp_path, rate_of, steps=range(steps), lr=lr)
    assert curve(tmp_path) == expected


def test_a_rate_that_stays_nan_has_no_further_points(tmp_path: Path) -> None:
    train(tmp_path, lambda step: 0.1 if step < 150 else float("nan"), steps=range(210))
    assert [step for step, _ in curve(tmp_path)] == [0, 100, 149, 150, 200]


def test_a_resumed_run_continues_its_curves(tmp_path: Path) -> None:
    train(tmp_path, jump, steps=range(150))
    train(tmp_path, jump, steps=range(150, 310), first_step=150)
    assert curve(tmp_path) == [
        *((0, 0.1), (100, 0.1), (150, 0.1), (199, 0.1), (200, 0.01), (300, 0.01))
    ]


def test_a_group_that_is_added_later_has_a_separate_curve(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with HookLogger(model, tmp_path, alerts=(), every_n_steps=100):
        for step in range(20):
            if step == 10:
                optimizer.add_param_group({"params": model[1].parameters(), "lr": 0.5})
            if step == 15:
                optimizer.param_groups[1]["lr"] = 0.25
            descend(model, INPUTS, optimizer)
    assert {rate for _, rate in curve(tmp_path)} == {0.1}
    assert curve(tmp_path, group=1) == [(10, 0.5), (14, 0.5), (15, 0.25)]


def test_an_optimizer_that_steps_less_often_has_a_separate_curve(tmp_path: Path) -> None:
    """Two optimizers of a GAN; the one that steps less often comes first in the loop."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    every = torch.optim.SGD(model[0].parameters(), lr=0.1)
    rare = torch.optim.SGD(model[1].parameters(), lr=0.5)
    with HookLogger(model, tmp_path, alerts=(), every_n_steps=100, optimizer=every):
        for step in range(20):
            if step == 12:
                rare.param_groups[0]["lr"] = 0.25
            descend(model, INPUTS, *([rare] if step % 5 == 2 else []), every)
    assert {rate for _, rate in curve(tmp_path)} == {0.1}
    assert curve(tmp_path, group=1) == [(2, 0.5), (11, 0.5), (12, 0.25)]


def test_a_schedule_between_two_optimizers_changes_the_rate_of_the_next_step(
    tmp_path: Path,
) -> None:
    recorder = Recorder()
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model)
    schedule = torch.optim.lr_scheduler.LambdaLR(first, lambda step: 1.0 + step)
    with HookLogger(model, tmp_path, alerts=[recorder], optimizer=second):
        for _ in range(3):
            model.zero_grad()
            loss_of(model, INPUTS).backward()
            first.step()
            schedule.step()
            second.step()
    rates = [record.learning_rates for record in recorder.records]
    assert rates == [pytest.approx((0.1 * k, 0.1)) for k in (1, 2, 3)]


def test_steps_of_an_optimizer_without_a_learning_rate_are_logged(tmp_path: Path) -> None:
    class OwnRate(torch.optim.Optimizer):
        """Optimizer that computes its rate, like Adafactor."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.grad

    model = nn.Linear(2, 1)
    optimizer = OwnRate(model.parameters(), {"lr": None})
    with HookLogger(model, tmp_path, alerts=()):
        descend(model, INPUTS, optimizer, steps=3)
    norms = Board(open_slow(tmp_path)).scalars()["."]["grad_norm/total"]
    assert [norm > 0 for _, norm in norms] == [True] * 3


def test_times_and_depths_are_those_of_the_records(tmp_path: Path) -> None:
    """The time of a phase counts for no step; layers without gradients have no part in a curve."""
    recorder = Recorder()
    model = nn.Sequential(*[nn.Linear(3, 3, bias=False) for _ in range(5)])
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with HookLogger(model, tmp_path, every_n_steps=4, alerts=[recorder]) as logger:
        for step in range(9):
            for size in (5, 3):
                model(torch.randn(size, 3)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 6:
                with torch.no_grad(), logger.phase("validation"):
                    model(torch.randn(100, 3))
    curves = Board(open_slow(tmp_path)).scalars()["."]
    trained = {record.step: record for record in recorder.records if not record.phase}
    took = np.diff([trained[step].wall_time for step in range(9)])
    step_s = dict(curves["time/step_s"])
    assert step_s[4] == pytest.approx(took[:4].mean(), rel=1e-4)
    assert step_s[8] == pytest.approx(took[[4, 5, 7]].mean(), rel=1e-4), "6 to 7 has the phase"
    assert dict(curves["time/examples_per_s"])[4] * step_s[4] == pytest.approx(8, rel=1e-4)
    for step in (0, 4, 8):
        record = trained[step]
        logs = np.log10(record.grad_norms[record.grad_present].astype(np.float64))
        assert len(logs) == 4
        ratios = np.log10([*record.update_ratios.values()])
        for name, share in {"p05": 0.05, "median": 0.5, "p95": 0.95}.items():
            found = {k: dict(v)[step] for k, v in curves.items() if k.endswith(name)}
            assert found[f"depth/log10_grad_norm/{name}"] == pytest.approx(np.quantile(logs, share))
            expected = np.quantile(ratios, share)
            assert found[f"depth/log10_update_ratio/{name}"] == pytest.approx(expected, rel=1e-4)
    assert {step for step, _ in curves["depth/log10_grad_norm/median"]} == {0, 4, 8}

"""Adam's running means of squared gradients after each step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from telemetry import HookLogger
from telemetry.testing import capture_run
from tests.helpers.hand import array, assert_tensor
from tests.helpers.require import require
from tests.helpers.twins import Outcome, assert_left_alone, descend

Make = Callable[..., torch.optim.Optimizer]

WITH_SECOND_MOMENTS: dict[str, Make] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "foreach": partial(torch.optim.AdamW, foreach=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "amsgrad": partial(torch.optim.Adam, amsgrad=True),
}
WITHOUT: dict[str, Make] = {
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamax": torch.optim.Adamax,
    "adafactor": lambda *args, **options: require("torch.optim.Adafactor")(*args, **options),
    "lbfgs": torch.optim.LBFGS,
}


class Net(nn.Sequential):
    """Network with a parameter that gets no gradient, so that no optimizer makes a state for it."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.unused = nn.Parameter(torch.ones(5))


def loop_of(make: Make, *, overflow_at: int | None = None) -> Callable[..., Iterator[Tensor]]:
    """Return a loop that yields the second moments after each step."""

    def loop(model: Any, logger: HookLogger | None) -> Iterator[Tensor]:
        optimizer = make(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=overflow_at is not None)
        inputs = torch.ones(6, 3, device=model[0].weight.device)
        for iteration in range(4):
            optimizer.zero_grad()
            factor = 1e38 if iteration == overflow_at else 1.0

            def closure(factor: float = factor) -> Tensor:
                loss = model(inputs).square().mean() * factor
                scaler.scale(loss).backward()
                return loss

            if isinstance(optimizer, torch.optim.LBFGS):
                optimizer.step(closure)
            else:
                closure()
                scaler.step(optimizer)
                scaler.update()
            states = [optimizer.state[p] for p in model.parameters() if p in optimizer.state]
            moments = [s["exp_avg_sq"].flatten() for s in states if "exp_avg_sq" in s]
            yield torch.cat(moments).cpu() if moments else torch.zeros(0)

    return loop


def assert_second_moments(outcome: Outcome) -> None:
    """Check that each record has the optimizer's second moments at the end of its step."""
    sizes = {n: p.numel() for n, p in outcome.model.named_parameters() if n != "unused"}
    for record, after in zip(outcome.records, outcome.yielded, strict=True):
        assert list(record.second_moments) == list(sizes)
        for (name, tensor), values in zip(
            record.second_moments.items(), after.split(list(sizes.values())), strict=True
        ):
            assert_tensor(tensor, [array(values)], f"{name} at step {record.step}")


@pytest.mark.parametrize("kind", WITH_SECOND_MOMENTS)
def test_second_moments_are_read_after_the_step(tmp_path: Path, kind: str) -> None:
    outcome = assert_left_alone(Net, loop_of(WITH_SECOND_MOMENTS[kind]), tmp_path)
    assert len(outcome.full) == 4
    assert outcome.full[0].second_moments["0.weight"].sketch.sum > 0
    assert_second_moments(outcome)


@pytest.mark.parametrize("kind", WITHOUT)
def test_other_optimizers_have_no_second_moments(tmp_path: Path, kind: str) -> None:
    outcome = assert_left_alone(Net, loop_of(WITHOUT[kind]), tmp_path)
    assert len(outcome.full) == 4
    assert all(record.weights and not record.second_moments for record in outcome.full)


@pytest.mark.parametrize(
    ("options", "measured"),
    [({"measure": "gradients"}, [False] * 4), ({"every_n_steps": 2}, [True, False, True, False])],
)
def test_second_moments_are_those_of_full_steps_with_weights(
    tmp_path: Path, options: dict[str, Any], measured: list[bool]
) -> None:
    outcome = assert_left_alone(Net, loop_of(torch.optim.Adam), tmp_path, **options)
    assert [bool(record.second_moments) for record in outcome.records] == measured


def test_a_step_that_a_scaler_skips_has_no_second_moments(tmp_path: Path) -> None:
    outcome = assert_left_alone(Net, loop_of(torch.optim.Adam, overflow_at=1), tmp_path)
    assert [record.step for record in outcome.records] == [0, 1, 2]
    del outcome.yielded[1]
    assert_second_moments(outcome)


def test_a_step_that_a_fused_optimizer_skips_keeps_the_second_moments(tmp_path: Path) -> None:
    fused = WITH_SECOND_MOMENTS["fused"]
    outcome = assert_left_alone(Net, loop_of(fused, overflow_at=1), tmp_path)
    assert [record.skipped for record in outcome.records] == [False, True, False, False]
    assert_second_moments(outcome)
    before, after = (record.second_moments["0.weight"].sketch for record in outcome.records[:2])
    assert before.sum == after.sum


def test_each_of_two_optimizers_has_its_second_moments() -> None:
    model = Net()
    adam = torch.optim.Adam(model[0].parameters())
    sgd = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with capture_run(model, rules=()) as run:
        descend(model, torch.ones(6, 3), adam, sgd, steps=2)
    for record in run.records:
        assert list(record.second_moments) == ["0.weight", "0.bias"]


@pytest.mark.gpu
@pytest.mark.parametrize("option", ["foreach", "fused", "capturable"])
def test_second_moments_are_read_on_a_gpu(tmp_path: Path, option: str) -> None:
    make = partial(torch.optim.Adam, **{option: True})
    outcome = assert_left_alone(lambda: Net().cuda(), loop_of(make), tmp_path)
    assert_second_moments(outcome)

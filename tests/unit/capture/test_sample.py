"""Feature maps of a fixed sample: the loop runs it in a phase of its own."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from telemetry import HookLogger
from tests.helpers.loops import load
from tests.helpers.twins import assert_left_alone

SAMPLE = torch.linspace(-1, 1, 3 * 8 * 8).view(1, 3, 8, 8)


def model() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout(), nn.Flatten(), nn.Linear(4 * 36, 2))


def loop(model: nn.Module, logger: HookLogger | None) -> Iterable[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad(), logger.phase("sample") if logger else nullcontext():
            yield model(SAMPLE)
        model.train()
        yield from (parameter.grad for parameter in model.parameters())


def test_pictures_of_a_phase_are_those_of_its_input_at_each_step(tmp_path: Path) -> None:
    assert_left_alone(model, loop, tmp_path, every_n_steps=2)
    board = load(tmp_path)
    for tag, of_batches in (("feature_maps/0000.0", 2), ("input", 2)):
        of_sample = board.Tensors(f"sample/{tag}")
        assert [event.step for event in of_sample] == [1, 2, 3, 4]
        assert len({event.tensor_proto.string_val[2] for event in of_sample}) == 1
        assert len({event.tensor_proto.string_val[2] for event in board.Tensors(tag)}) == of_batches

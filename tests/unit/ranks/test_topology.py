"""A rank sends the addends of small gradients, and logs once that it does not send larger ones."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial

from telemetry.ranks.topology import MOST_ADDED, RankNotes, RankObserver


class Mesh:
    """Device mesh of two ranks, seen by rank 0."""

    mesh, shape, ndim = torch.arange(2), (2,), 1

    def get_coordinate(self) -> list[int]:
        return [0]

    def size(self) -> int:
        return 2


class Addend:
    """DTensor of one rank without a process group."""

    placements = (Partial(),)
    device_mesh = Mesh()

    def __init__(self, size: int) -> None:
        self.local = torch.ones(size)
        self._spec = SimpleNamespace(
            mesh=self.device_mesh, placements=self.placements, shape=(size,)
        )

    def to_local(self) -> torch.Tensor:
        return self.local


def test_a_gradient_that_is_a_large_sum_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    notes, observer = RankNotes(), RankObserver(rank=0, size=2)
    grads: Any = [(0, Addend(MOST_ADDED)), (1, Addend(MOST_ADDED + 1)), (2, Addend(2**17))]
    observer.note_grads(notes, grads)
    assert [*notes.addends] == [0]
    assert [*notes.grads] == [0, 1, 2]
    (message,) = caplog.messages
    assert str(MOST_ADDED) in message

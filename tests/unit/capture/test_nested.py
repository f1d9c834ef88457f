"""Tensors inside of arguments and outputs: order, kinds of containers, depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from telemetry.capture.nested import tensors_in


@dataclass
class Output:
    hidden: Tensor
    label: str = ""


def test_tensors_are_found_in_every_kind_of_container_in_their_order() -> None:
    first, second, third, fourth = torch.arange(4).unbind()
    value = ({"a": first, "b": [second, "text"]}, Output(third), None, fourth, Output)
    assert [int(tensor) for tensor in tensors_in(value)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("containers", "found"), [(8, 1), (9, 0)])
def test_tensors_are_found_up_to_eight_containers_deep(containers: int, found: int) -> None:
    value: Any = torch.ones(())
    for _ in range(containers):
        value = [value]
    assert len(tensors_in(value)) == found


def test_a_container_that_contains_itself_ends() -> None:
    value: list[Any] = [torch.ones(())]
    value.append(value)
    assert len(tensors_in(value)) == 8

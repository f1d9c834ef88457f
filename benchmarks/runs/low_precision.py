"""Values or units that leave the range of the others while the loss stays; each with a twin."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import SGD

from runs.training import Log, fit, mlp
from runs.unfamiliar import JUMP, at_step, class_loss, twins


def _classifier(*widths: int) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), mlp(64, *widths, 10))


def _move_scale(model: nn.Module, into: str, out: str, unit: int, factor: float) -> None:
    """Make one unit larger, and its weights in the next layer as much smaller."""
    with torch.no_grad():
        model.get_parameter(f"{into}.weight")[unit] *= factor
        model.get_parameter(f"{into}.bias")[unit] *= factor
        model.get_parameter(f"{out}.weight")[:, unit] /= factor


@twins(
    kinds=JUMP, layers=("1.0",), onset=100,
    why="one unit is 3,000 times as large and the next layer divides by it: the loss is the same",
    healthy="digits with two hidden layers",
)  # fmt: skip
def one_unit_carries_the_scale(log: Log, faulty: bool) -> None:
    model = _classifier(48, 32)
    move = at_step(100, faulty, lambda: _move_scale(model, "1.0", "1.2", 5, 3000.0))
    fit(log, model, SGD(model.parameters(), 0.02), class_loss(log, model), 240, before=move)


class Offset(nn.Module):
    """Digits; a residual stream with an offset that a normalization takes away."""

    def __init__(self) -> None:
        super().__init__()
        self.look, self.more = nn.Linear(64, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 10)
        self.register_buffer("offset", torch.zeros(32))
        self.offset: Tensor

    def forward(self, images: Tensor) -> Tensor:
        x = torch.relu(self.look(images.flatten(1)))
        x = x + self.more(x) - self.offset
        logits: Tensor = self.head(torch.relu(x))
        return logits


@twins(
    kinds=frozenset({"output_collapse"}), layers=("more",), onset=110,
    why="a bias of 1e7 in one unit, which a buffer takes away again: one value hides all others",
    healthy="digits with a residual layer",
)  # fmt: skip
def massive_activation(log: Log, faulty: bool) -> None:
    model = Offset()

    def add() -> None:
        model.more.bias[7] += 2.0**23
        model.offset[7] += 2.0**23

    move = at_step(110, faulty, add)
    fit(log, model, SGD(model.parameters(), 0.02), class_loss(log, model), 240, before=move)


@twins(
    kinds=JUMP, layers=("1.2",), onset=120,
    why="one weight of a unit that never fires is 1e7: e4m3 makes all others of the matrix zero",
    healthy="digits with two hidden layers, Adam",
)  # fmt: skip
def one_weight_hides_the_others(log: Log, faulty: bool) -> None:
    model = _classifier(48, 32)
    layer = model.get_submodule("1.2")

    def act() -> None:
        layer.get_parameter("weight")[4, 2] = -1e7
        layer.get_parameter("bias")[4] = -1e3

    fit(log, model, SGD(model.parameters(), 0.02), class_loss(log, model), 260,
        before=at_step(120, faulty, act))  # fmt: skip
